"""Every vLLM internal the tap relies on, in one place, checked when the server starts.

Written against vLLM 0.30. ``verify`` compares names and signatures; what they do is pinned by the
tests in ``tests/serving``, which run against the real server.
"""

import importlib
import inspect
from typing import Any

METHODS: dict[str, tuple[str, ...]] = {
    # Runs in the HTTP handler's context, before the request goes to the engine process.
    "output_processor.add_request": (
        "request",
        "prompt",
        "parent_req",
        "request_index",
        "queue",
    ),
    # Runs once per engine step, synchronously, before any handler sees the step's tokens.
    "output_processor.process_outputs": (
        "engine_core_outputs",
        "engine_core_timestamp",
        "iteration_stats",
    ),
    # Returns the internal ids of the requests that it ended.
    "output_processor.abort_requests": ("request_ids", "internal"),
    # ``finish_weight_update`` names the new weights by calling ``update_weight_version``.
    "start_weight_update": (),
    "finish_weight_update": ("weight_version",),
    "update_weight_version": ("new_version",),
    # Returns whether the cache was reset.
    "reset_prefix_cache": ("reset_running_requests", "reset_connector"),
    "reset_encoder_cache": (),
}
"""Methods of the engine client (``vllm.v1.engine.async_llm.AsyncLLM``) and their parameters."""

ATTRIBUTES = (
    "output_processor.request_states",
    "model_config.logprobs_mode",
    "model_config.dtype",
    "model_config.max_model_len",
)
"""Attributes of the engine client."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id",
        "external_req_id",
        "prompt_token_ids",
        "sampling_params",
        "resumable",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "finish_reason",
    ),
    "vllm.v1.engine.parallel_sampling:ParentRequest": ("request_id", "sampling_params"),
    "vllm.v1.engine.output_processor:RequestState": (
        "detokenizer",
        "num_cached_tokens",
        "routed_experts_chunks",
    ),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("num_output_tokens",),
    # Row k belongs to the step's k-th token; the first column is the sampled one.
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs"),
    "vllm.sampling_params:SamplingParams": (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
        "logprobs",
        "num_logprobs",
    ),
}
"""``module:class`` and the fields or attributes that its instances have."""


def verify(engine_client: Any) -> list[str]:
    """Return one line for each internal that is missing or has changed; empty when all is well."""
    problems = []
    for path, expected in METHODS.items():
        try:
            method = _resolve(engine_client, path)
            parameters = tuple(inspect.signature(method).parameters)
        except (AttributeError, TypeError, ValueError):
            problems.append(f"{path} is missing")
            continue
        if parameters != expected:
            problems.append(f"{path} takes {parameters}, expected {expected}")
    for path in ATTRIBUTES:
        try:
            _resolve(engine_client, path)
        except AttributeError:
            problems.append(f"{path} is missing")
    for where, names in FIELDS.items():
        module, _, name = where.partition(":")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            problems.append(f"{where} is missing")
            continue
        problems += [f"{where}.{field} is missing" for field in names if not _has(cls, field)]
    return problems


def _resolve(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


def _has(cls: type, field: str) -> bool:
    # A plain class has no list of its fields: its constructor names those that it assigns.
    constructor = inspect.getattr_static(cls, "__init__", None)
    return (
        hasattr(cls, field)
        or field in getattr(cls, "__struct_fields__", ())
        or field in getattr(cls, "__dataclass_fields__", ())
        or field in getattr(getattr(constructor, "__code__", None), "co_names", ())
    )
