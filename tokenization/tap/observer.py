"""The engine side of the token tap: see every step's tokens of tapped calls, change nothing else.

Tokens are taken from ``EngineCoreOutput``, one engine step at a time, where they are exact for
every protocol, streamed or not, cancelled or not. Nothing that goes wrong here may reach vLLM's
output handler, which serves all requests: it is logged, counted and marked in the call.
"""

import logging
import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tokenization.tap import wire
from tokenization.tap.calls import Call, Output
from tokenization.tap.middleware import current_call

logger = logging.getLogger("vllm.ridealong.tap")


class EngineObserver:
    """Wraps an engine client's output processor and its weight-update methods, in place."""

    def __init__(self, engine_client: Any, version: str) -> None:
        self.version = version
        self.failures = 0
        self._processor = engine_client.output_processor
        self._logprobs_mode = str(engine_client.model_config.logprobs_mode)
        # Outputs belong to their calls, which are bounded: what vLLM forgets to end can't pile up.
        self._outputs: WeakValueDictionary[str, Output] = WeakValueDictionary()
        self._wrap_processor()
        self._wrap_weight_updates(engine_client)

    def _wrap_processor(self) -> None:
        processor = self._processor
        vllm_add_request = processor.add_request
        vllm_process_outputs = processor.process_outputs
        vllm_abort_requests = processor.abort_requests

        def add_request(
            request: Any,
            prompt: str | None,
            parent_req: Any = None,
            request_index: int = 0,
            queue: Any = None,
        ) -> None:
            call = current_call.get()
            if call is not None:
                self._register(call, request, parent_req, request_index)
            vllm_add_request(request, prompt, parent_req, request_index, queue)

        def process_outputs(
            engine_core_outputs: list[Any],
            engine_core_timestamp: float | None = None,
            iteration_stats: Any = None,
        ) -> Any:
            tapped = self._find_tapped(engine_core_outputs)
            result = vllm_process_outputs(
                engine_core_outputs, engine_core_timestamp, iteration_stats
            )
            for output, step, state in tapped:
                self._record(output, step, state)
            return result

        def abort_requests(request_ids: Iterable[str], internal: bool) -> list[str]:
            aborted = vllm_abort_requests(request_ids, internal)
            for request_id in aborted:
                output = self._outputs.pop(request_id, None)
                if output is not None:
                    output.end("abort", output.count)
            return aborted

        processor.add_request = add_request
        processor.process_outputs = process_outputs
        processor.abort_requests = abort_requests

    def _wrap_weight_updates(self, engine_client: Any) -> None:
        vllm_start = engine_client.start_weight_update
        vllm_name = engine_client.update_weight_version

        async def start_weight_update() -> None:
            await vllm_start()
            self.version = wire.UNKNOWN_VERSION

        async def update_weight_version(new_version: str) -> None:
            await vllm_name(new_version)
            self.version = new_version

        engine_client.start_weight_update = start_weight_update
        engine_client.update_weight_version = update_weight_version

    def _register(self, call: Call, request: Any, parent: Any, index: int) -> None:
        try:
            params = request.sampling_params
            if params is None or request.resumable:
                return
            shared = parent or request
            output = call.output(
                request_key=shared.request_id,
                index=index,
                request_id=request.external_req_id,
                prompt_ids=request.prompt_token_ids or [],
                params=self._params(params, parent.sampling_params.n if parent else params.n),
            )
            self._outputs[request.request_id] = output
            if params.num_logprobs is None:
                # The sampled token's logprob and no other. It is not in the reply: vLLM's
                # protocols answer with logprobs only where the HTTP request asked for them.
                params.logprobs = 0
        except Exception:
            self._fault("a request could not be registered")
            call.emit({"e": "error", "r": 0, "error": "the tap missed an engine request"})

    def _params(self, params: Any, n: int) -> dict[str, Any]:
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "n": n,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "stop": params.stop,
            "stop_token_ids": params.stop_token_ids,
            "ignore_eos": params.ignore_eos,
            "logit_bias": params.logit_bias is not None,
            "bad_words": bool(params.bad_words),
            "allowed_token_ids": params.allowed_token_ids is not None,
            "structured_outputs": params.structured_outputs is not None,
            "logprobs_mode": self._logprobs_mode,
        }

    def _find_tapped(self, steps: list[Any]) -> list[tuple[Output, Any, Any]]:
        """Pair steps with their outputs, before vLLM forgets the state of those that finish."""
        if not self._outputs:
            return []
        tapped = []
        try:
            states = self._processor.request_states
            for step in steps:
                output = self._outputs.get(step.request_id)
                # Without a state the request was aborted, and vLLM drops the step too.
                if output is not None and step.request_id in states:
                    tapped.append((output, step, states[step.request_id]))
        except Exception:
            self._fault("an engine step could not be read")
            for output in self._outputs.values():
                output.fail("the tap missed an engine step")
        return tapped

    def _record(self, output: Output, step: Any, state: Any) -> None:
        try:
            ids = step.new_token_ids
            if ids:
                output.cached = state.num_cached_tokens
                output.tokens(list(ids), self._logprobs(output, step), self.version)
            if step.request_id in self._processor.request_states:
                return
            if state.routed_experts_chunks:
                output.experts(np.concatenate(state.routed_experts_chunks, axis=0))
            # vLLM finds stop strings after the engine step, which then carries no reason itself.
            reason = step.finish_reason
            finish = "stop" if reason is None else str(reason)
            output.end(finish, state.detokenizer.num_output_tokens())
            self._outputs.pop(step.request_id, None)
        except Exception:
            self._fault("an engine step could not be recorded")
            output.fail("the tap could not record an engine step")

    def _logprobs(self, output: Output, step: Any) -> list[float]:
        """Return the sampled tokens' logprobs, after checking that they are these tokens'."""
        ids, lists = step.new_token_ids, step.new_logprobs
        if lists is None or lists.logprob_token_ids[:, 0].tolist() != ids:
            output.fail("the engine's logprobs are not those of the sampled tokens")
            return [math.nan] * len(ids)
        return lists.logprobs[:, 0].tolist()

    def _fault(self, what: str) -> None:
        self.failures += 1
        logger.exception("ridealong tap: %s; the reply is not affected", what)
