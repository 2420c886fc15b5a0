"""The tap's bookkeeping: in whatever order events come, the lines decode to what was sampled."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.tapped import cut
from tokenization.tap import calls, wire
from tokenization.tap.calls import Call, Calls

NONCE = "0123456789abcdef"
STEP = st.tuples(
    st.integers(0, 2),
    st.lists(st.integers(0, 50_000), min_size=1, max_size=3),
    st.sampled_from(["v0", "v1", "v2"]),
    st.booleans(),
)


def new_output(call: Call, index: int = 0, key: str = "a") -> calls.Output:
    return call.output(key, index, "chatcmpl-1", [1, 2, 3], {"temperature": 1.0})


@given(st.lists(STEP, max_size=40))
def test_lines_decode_to_what_was_sampled(steps: list[tuple[int, list[int], str, bool]]) -> None:
    call = Call(NONCE)
    outputs = [new_output(call, index) for index in range(3)]
    expected: list[tuple[list[int], list[str]]] = [([], []) for _ in outputs]
    sent = b""
    for index, ids, version, drain in steps:
        outputs[index].tokens(ids, [-float(i) for i in ids], version)
        expected[index][0].extend(ids)
        expected[index][1].extend([version] * len(ids))
        sent += call.drain() if drain else b""
    for output in outputs:
        output.end("stop", output.count)
    sent += call.drain()

    clean, lines = cut(sent, NONCE)
    assert clean == b""
    assert call.events().decode().splitlines() == lines
    (request,) = wire.decode(lines)
    for index, (ids, versions) in enumerate(expected):
        output = request.outputs[index]
        assert (output.ids, output.versions) == (ids, versions)
        assert output.logprobs == [-float(i) for i in ids]
        assert (output.reported, output.finish) == (len(ids), "stop")


def test_tokens_of_one_version_share_a_line() -> None:
    call = Call(NONCE)
    output = new_output(call)
    for token in range(100):
        output.tokens([token], [-0.5], "v0" if token < 60 else "v1")
    assert call.drain().count(b'"e":"tok"') == 2


def test_requests_are_numbered_in_order() -> None:
    call = Call(NONCE)
    for key in ("a", "b"):
        new_output(call, 0, key).end("stop", 0)
        new_output(call, 1, key).end("stop", 0)
    requests = wire.decode(cut(call.drain(), NONCE)[1])
    assert [(r.index, sorted(r.outputs)) for r in requests] == [(0, [0, 1]), (1, [0, 1])]


def test_a_count_that_differs_is_an_error() -> None:
    call = Call(NONCE)
    output = new_output(call)
    output.tokens([7], [-1.0], "v0")
    output.end("stop", 2)
    (request,) = wire.decode(cut(call.drain(), NONCE)[1])
    assert request.outputs[0].finish == "error"


def test_a_logprob_that_is_no_number_travels_as_null() -> None:
    call = Call(NONCE)
    new_output(call).tokens([7, 8], [-math.inf, -1.0], "v0")
    (request,) = wire.decode(cut(call.drain(), NONCE)[1])
    assert math.isnan(request.outputs[0].logprobs[0])
    assert request.outputs[0].logprobs[1] == -1.0


def test_routed_experts_keep_shape_and_values() -> None:
    call = Call(NONCE)
    routed = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    new_output(call).experts(routed)
    (request,) = wire.decode(cut(call.drain(), NONCE)[1])
    experts = request.outputs[0].routed_experts
    assert experts is not None
    assert experts["shape"] == [4, 3, 2]
    assert experts["dtype"] == "uint8"


def test_a_call_settles_when_answered_and_ended() -> None:
    store = Calls()
    call = store.open(NONCE)
    output = new_output(call)
    store.finish(call)
    assert not call.settled.is_set()
    output.end("abort", 0)
    assert call.settled.is_set()


def test_finished_calls_are_forgotten_after_a_minute() -> None:
    now = 0.0
    store = Calls(clock=lambda: now)
    live = store.open("live0000")
    store.finish(store.open("done0000"))
    now = calls.RETENTION_S - 1
    assert store.get("done0000") is not None
    now = calls.RETENTION_S + 1
    assert store.get("done0000") is None
    assert store.get("live0000") is live


def test_memory_is_bounded() -> None:
    store = Calls(clock=lambda: 0.0)
    for number in range(calls.MAX_FINISHED_CALLS + 10):
        store.finish(store.open(f"call{number:08}"))
    assert store.get("call00000000") is None
    assert store.get(f"call{calls.MAX_FINISHED_CALLS + 9:08}") is not None

    store = Calls(clock=lambda: 0.0)
    for number in range(5):
        call = store.open(f"big{number:08}")
        call.emit({"e": "tok", "r": 0, "i": 0, "text": "x" * (calls.MAX_FINISHED_BYTES // 3)})
        store.finish(call)
    kept = [number for number in range(5) if store.get(f"big{number:08}") is not None]
    assert kept == [3, 4]


def test_a_nonce_used_again_names_the_newer_call() -> None:
    now = 0.0
    store = Calls(clock=lambda: now)
    store.finish(store.open(NONCE))
    now = 30.0
    newer = store.open(NONCE)
    now = calls.RETENTION_S + 1
    assert store.get(NONCE) is newer
