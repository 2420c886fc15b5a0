"""The engine side of the tap on vLLM's real output processor, with engine steps made by hand.

What a running engine does not show on demand: several tokens a step, wrong log-probs, a vLLM that
has changed, a fault in our own code.
"""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from tokenization.tap import internals, wire
from tokenization.tap.calls import Call
from tokenization.tap.middleware import current_call
from tokenization.tap.observer import EngineObserver

PROMPT = [5, 6, 7]


class FakeEngineClient:
    """The real output processor without an engine process behind it."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.output_processor = OutputProcessor(tokenizer, log_stats=False)
        self.model_config = types.SimpleNamespace(
            logprobs_mode="processed_logprobs", dtype="float32", max_model_len=64
        )
        self.fail_start = False

    async def start_weight_update(self) -> None:
        if self.fail_start:
            raise RuntimeError("not configured")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        pass

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return True

    async def reset_encoder_cache(self) -> None:
        pass


class Engine:
    """One tapped call on a wrapped processor."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.client = FakeEngineClient(tokenizer)
        self.processor = self.client.output_processor
        self.observer = EngineObserver(self.client, "v0")
        self.call = Call("0123456789abcdef")

    def add(self, request_id: str = "r0", tapped: bool = True, **params: Any) -> EngineCoreRequest:
        request = EngineCoreRequest(
            request_id=request_id,
            external_req_id="chatcmpl-1",
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA, **params),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        token = current_call.set(self.call if tapped else None)
        try:
            self.processor.add_request(request, None, queue=collector())
        finally:
            current_call.reset(token)
        return request

    def step(
        self,
        ids: list[int],
        finish: FinishReason | None = None,
        request_id: str = "r0",
        of: list[int] | None = None,
        **fields: Any,
    ) -> Any:
        """Process one step; ``of`` are the tokens whose log-probs come with it."""
        output = EngineCoreOutput(
            request_id, ids, new_logprobs=logprobs(of or ids), finish_reason=finish, **fields
        )
        return self.processor.process_outputs([output])

    def output(self) -> wire.EngineOutput:
        (request,) = wire.decode(self.call.events().decode().splitlines())
        (output,) = request.outputs.values()
        return output


def collector() -> RequestOutputCollector:
    return RequestOutputCollector(RequestOutputKind.DELTA, "r0")


def logprobs(ids: list[int]) -> LogprobsLists:
    """Column 0 is the sampled token, column 1 the likeliest one."""
    return LogprobsLists(
        np.array([[token, 1] for token in ids], dtype=np.int32).reshape(-1, 2),
        np.array([[-0.25 * (token % 7), -0.1] for token in ids], dtype=np.float32).reshape(-1, 2),
        np.ones(len(ids), dtype=np.int32),
    )


@pytest.fixture
async def engine() -> Engine:
    return Engine()


async def test_several_tokens_a_step(engine: Engine) -> None:
    engine.add()
    engine.step([10, 11, 12])
    engine.step([13])
    engine.step([14, 2], FinishReason.STOP)
    output = engine.output()
    assert output.ids == [10, 11, 12, 13, 14, 2]
    assert output.logprobs == [-0.25 * (token % 7) for token in output.ids]
    assert (output.finish, output.reported) == ("stop", 6)


async def test_stop_string_in_the_middle_of_a_step(smol_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smol_model)
    engine = Engine(tokenizer)
    engine.add(stop=[" three"])
    ids = tokenizer.encode("one two three four")
    engine.step(ids[:1])
    result = engine.step(ids[1:])
    assert result.reqs_to_abort == ["r0"]
    engine.step([99])
    output = engine.output()
    # vLLM counts, and bills, every token of the step in which it finds the stop string.
    assert output.ids == ids
    assert (output.finish, output.reported) == ("stop", len(ids))


async def test_a_request_without_the_header_is_left_alone(engine: Engine) -> None:
    request = engine.add(tapped=False)
    assert request.sampling_params is not None
    assert request.sampling_params.logprobs is None
    assert not engine.call.tapped


async def test_logprobs_are_asked_for_only_where_the_client_did_not(engine: Engine) -> None:
    asked = engine.add("r1", logprobs=4).sampling_params
    silent = engine.add("r2").sampling_params
    chosen = engine.add("r3", logprob_token_ids=[3, 4]).sampling_params
    assert asked is not None
    assert silent is not None
    assert chosen is not None
    assert (asked.logprobs, silent.logprobs, chosen.logprobs) == (4, 0, None)


async def test_version_changes_between_steps(engine: Engine) -> None:
    engine.add()
    engine.step([10])
    await engine.client.start_weight_update()
    assert engine.observer.version == wire.UNKNOWN_VERSION
    await engine.client.finish_weight_update("v1")
    engine.step([11], FinishReason.LENGTH)
    assert engine.output().versions == ["v0", "v1"]


async def test_an_update_that_can_not_start_changes_no_version(engine: Engine) -> None:
    engine.client.fail_start = True
    with pytest.raises(RuntimeError, match="not configured"):
        await engine.client.start_weight_update()
    assert engine.observer.version == "v0"


async def test_an_update_without_a_name_leaves_the_version_unknown(engine: Engine) -> None:
    await engine.client.start_weight_update()
    await engine.client.finish_weight_update()
    engine.add()
    engine.step([10], FinishReason.STOP)
    assert engine.output().versions == [wire.UNKNOWN_VERSION]


async def test_abort_keeps_what_was_sampled_and_drops_what_comes_late(engine: Engine) -> None:
    engine.add()
    engine.step([10])
    assert engine.processor.abort_requests(["r0"], internal=True) == ["r0"]
    engine.step([11], FinishReason.ABORT)
    output = engine.output()
    assert (output.ids, output.finish, output.reported) == ([10], "abort", 1)


async def test_children_of_one_request(engine: Engine) -> None:
    request = engine.add("parent", tapped=False, n=2)
    parent = ParentRequest(request)
    token = current_call.set(engine.call)
    for index in range(2):
        child_id, params = parent.get_child_info(index)
        child = EngineCoreRequest(
            *[getattr(request, name) for name in EngineCoreRequest.__struct_fields__]
        )
        child.request_id, child.sampling_params = child_id, params
        engine.processor.add_request(child, None, parent, index, collector())
    current_call.reset(token)
    engine.step([20], FinishReason.LENGTH, "1_parent")
    engine.step([10, 11], FinishReason.LENGTH, "0_parent")
    (decoded,) = wire.decode(engine.call.events().decode().splitlines())
    assert decoded.params["n"] == 2
    assert {i: o.ids for i, o in decoded.outputs.items()} == {0: [10, 11], 1: [20]}


async def test_routed_experts_of_all_steps(engine: Engine) -> None:
    engine.add()
    engine.step([10], routed_experts=np.zeros((3, 2, 2), dtype=np.uint8))
    engine.step([11], FinishReason.STOP, routed_experts=np.ones((1, 2, 2), dtype=np.uint8))
    experts = engine.output().routed_experts
    assert experts is not None
    assert experts["shape"] == [4, 2, 2]


async def test_logprobs_of_other_tokens_are_an_error(engine: Engine) -> None:
    engine.add()
    engine.step([10], of=[99])
    engine.step([11], FinishReason.STOP)
    output = engine.output()
    assert output.ids == [10, 11]
    assert output.finish == "error"


async def test_our_fault_does_not_reach_vllm(engine: Engine) -> None:
    engine.add()
    engine.processor.process_outputs([EngineCoreOutput("r0", [10], new_logprobs=logprobs([10]))])
    broken = LogprobsLists(None, None, np.ones(1), None)  # type: ignore[arg-type]
    output = engine.observer._outputs["r0"]
    engine.observer._record(
        output, EngineCoreOutput("r0", [11], new_logprobs=broken), types.SimpleNamespace()
    )
    assert engine.observer.failures == 1
    engine.step([12], FinishReason.STOP)
    assert engine.output().finish == "error"


async def test_a_request_that_can_not_be_registered_is_served(engine: Engine) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    engine.call.output = fail  # type: ignore[method-assign]
    engine.add()
    assert engine.processor.has_request("r0")
    assert engine.observer.failures == 1
    with pytest.raises(wire.TapError, match="missed an engine request"):
        wire.decode(engine.call.events().decode().splitlines())


def test_internals_are_as_expected() -> None:
    assert internals.verify(FakeEngineClient()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: setattr(c.output_processor, "process_outputs", lambda outputs: None), "takes"),
        (lambda c: setattr(c, "update_weight_version", None), "update_weight_version is missing"),
        (lambda c: delattr(c, "output_processor"), "output_processor.add_request is missing"),
        (lambda c: delattr(c.model_config, "logprobs_mode"), "logprobs_mode is missing"),
    ],
)
def test_a_changed_vllm_is_noticed(change: Any, problem: str) -> None:
    client = FakeEngineClient()
    change(client)
    assert problem in "; ".join(internals.verify(client))


def test_a_missing_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        internals.FIELDS, "vllm.v1.engine:EngineCoreOutput", ("new_token_ids", "renamed")
    )
    monkeypatch.setitem(internals.FIELDS, "vllm.v1.engine:Gone", ("x",))
    assert internals.verify(FakeEngineClient()) == [
        "vllm.v1.engine:EngineCoreOutput.renamed is missing",
        "vllm.v1.engine:Gone is missing",
    ]
