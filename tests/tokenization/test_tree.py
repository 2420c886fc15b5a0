"""The call tree: what merges, why branches open, and that each token is trained exactly once."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenization.made import call
from tokenization import tree
from tokenization.calls import Call, Dialogue, Reply
from tokenization.checks import Failure
from tokenization.tree import ForkReason

A1 = ([1, 2, 3], [10, 11])
A2 = ([1, 2, 3, 10, 11, 20], [12, 13])
A3 = ([1, 2, 3, 10, 11, 20, 12, 13, 21], [14])
B1 = ([7, 8], [30])
B2 = ([7, 8, 30, 40], [31, 32])


def calls_of(*turns: tuple[Sequence[int], Sequence[int]]) -> list[Call]:
    return [call(f"c{k}", p, o, started=float(k)) for k, (p, o) in enumerate(turns)]


def all_samples(calls: Sequence[Call]):
    grown = tree.build(calls)
    return tree.samples(grown, "run", {c.id for c in calls if c.left_out is None})


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        pytest.param([A1, A2, A3], 1, id="linear"),
        pytest.param([A1, B1, A2, B2], 2, id="interleaved"),
        pytest.param([A1, A2, B1, A3], 2, id="detour"),
        pytest.param([A1, A2, ([1, 2, 99], [15])], 2, id="compaction"),
        pytest.param([A1, ([1, 2, 3, 10, 77, 20], [12])], 2, id="one drifted token"),
        pytest.param([A1, ([1, 2, 3], [16]), ([1, 2, 3], [17]), A1], 4, id="identical prompts"),
        pytest.param([A1, A2, ([1, 2, 3, 10, 11, 50], [51])], 2, id="fork in the middle"),
        pytest.param([A1, ([1, 2, 3, 10, 11], [12])], 1, id="nothing in between"),
    ],
)
def test_number_of_samples(turns, count):
    assert len(all_samples(calls_of(*turns))) == count


def test_linear_run_is_one_sequence():
    (sample,) = all_samples(calls_of(A1, A2, A3))
    assert sample.token_ids.tolist() == [*A3[0], *A3[1]]
    sampled = {3: 10, 4: 11, 6: 12, 7: 13, 9: 14}
    assert {int(k): int(sample.token_ids[k]) for k in np.flatnonzero(sample.loss_mask)} == sampled
    assert sample.calls == ("c0", "c1", "c2")
    assert np.isnan(sample.logprobs[~sample.loss_mask]).all()
    assert sample.logprobs[sample.loss_mask].tolist() == [-1, -2, -2, -3, -3]
    assert (sample.versions[~sample.loss_mask] == -1).all()
    assert sample.token_ids.dtype == np.int32 and sample.logprobs.dtype == np.float32
    assert sample.versions.dtype == np.int32 and sample.loss_mask.dtype == np.bool_


def test_shared_turn_is_trained_in_one_branch_only():
    first, second = all_samples(calls_of(A1, A2, ([1, 2, 3, 10, 11, 50], [51])))
    assert first.loss_mask.sum() == 4
    assert second.token_ids.tolist() == [1, 2, 3, 10, 11, 50, 51]
    assert second.loss_mask.tolist() == [False] * 6 + [True]
    assert second.calls == ("c0", "c2")


def test_failed_call_is_context_but_never_trained():
    bad = (Failure("logprob count", "1 for 2 tokens"),)
    calls = [
        call("c0", *A1, started=0, failures=bad),
        call("c1", *A2, started=1),
        call("c2", *A3, started=2, failures=bad),
    ]
    (sample,) = all_samples(calls)
    assert sample.token_ids.tolist() == [*A2[0], *A2[1]]
    assert np.flatnonzero(sample.loss_mask).tolist() == [6, 7]
    assert sample.calls == ("c0", "c1")


def test_cancelled_call_is_context_but_not_trained():
    calls = [call("c0", *A1, started=0, outcome="cancelled"), call("c1", *A2, started=1)]
    (sample,) = all_samples(calls)
    assert np.flatnonzero(sample.loss_mask).tolist() == [6, 7]


def test_temperatures_are_not_mixed():
    calls = [
        call("c0", *A1, started=0, temperature=1.0),
        call("c1", *A2, started=1, temperature=0.7),
    ]
    cool, warm = all_samples(calls)
    assert (cool.temperature, warm.temperature) == (0.7, 1.0)
    assert np.flatnonzero(cool.loss_mask).tolist() == [6, 7]
    assert warm.token_ids.tolist() == [1, 2, 3, 10, 11]


def test_order_of_arrival_does_not_matter():
    calls = calls_of(A1, B1, A2, B2, A3)
    forward = all_samples(calls)
    backward = all_samples(calls[::-1])
    assert [s.token_ids.tolist() for s in forward] == [s.token_ids.tolist() for s in backward]


def test_agent_id_chooses_between_equal_paths():
    calls = [
        call("a", *A1, started=0, agent="a"),
        call("b", *A1, started=1, agent="b"),
        call("a2", *A2, started=2, agent="a"),
    ]
    grown = tree.build(calls)
    assert [n.parent for n in grown.nodes] == [None, None, 0]


# Reasons


def forks(calls: Sequence[Call]) -> list[str | None]:
    return [str(n.fork) if n.fork else None for n in tree.build(calls).nodes]


def said(*items: tuple[str, ...], context: str = "main", reasoned: bool = False) -> Dialogue:
    return Dialogue(context, items, reasoned)


USER, ANSWER, RESULT = ("user", "hi"), ("assistant", "yes"), ("result", "42")
REPLY = Reply((ANSWER,))


def test_reasons_root_continuation_and_subagent():
    calls = [
        call("a", *A1, started=0, agent="main"),
        call("b", *B1, started=1, agent="child"),
        call("c", *A2, started=2, agent="main"),
    ]
    assert forks(calls) == ["root", "subagent", None]


def test_reason_side_call():
    calls = [
        call("a", *A1, started=0, dialogue=said(USER), reply=REPLY),
        call("b", *B1, started=1, dialogue=said(USER, context="title")),
    ]
    assert forks(calls) == ["root", "side_call"]


def test_reason_retry_and_repeat():
    bad = (Failure("tap incomplete", "no end event"),)
    calls = [
        call("a", *A1, started=0, failures=bad),
        call("b", [1, 2, 3], [9], started=1),
        call("c", [1, 2, 3], [8], started=2),
    ]
    assert forks(calls) == ["root", "retry", "repeat"]


def test_reason_drift_names_the_token():
    calls = [
        call("a", *A1, started=0, dialogue=said(USER), reply=REPLY),
        call("b", [1, 2, 3, 10, 77, 20], [12], started=1, dialogue=said(USER, ANSWER, RESULT)),
    ]
    assert forks(calls)[1] == "drift at token 4"


def test_reason_reasoning_stripped():
    reply = Reply((ANSWER,), reasoned=True)
    calls = [
        call("a", *A1, started=0, dialogue=said(USER), reply=reply),
        call("b", [1, 2, 3, 11, 20], [12], started=1, dialogue=said(USER, ANSWER, RESULT)),
    ]
    assert forks(calls)[1] == "reasoning_stripped at token 3"


def test_reason_compaction_and_edited_history():
    long = said(USER, ANSWER, RESULT, ANSWER, RESULT)
    calls = [
        call("a", *A2, started=0, dialogue=long, reply=REPLY),
        call("b", [1, 5, 5], [12], started=1, dialogue=said(("user", "summary"))),
        call(
            "c",
            [1, 6, 6],
            [13],
            started=2,
            dialogue=said(("user", "other"), ANSWER, RESULT, ANSWER),
        ),
    ]
    assert forks(calls) == ["root", "compaction at token 1", "edited_history at token 1"]


def test_reasons_without_dialogue():
    drifted = ([1, 2, 3, 10, 77], [12])
    edited = ([1, 9, 3, 10, 11, 20], [12])
    assert forks(calls_of(A1, drifted))[1] == "drift at token 4"
    assert forks(calls_of(A1, edited))[1] == "edited_history at token 1"
    assert forks(calls_of(A1, B1))[1] == "unknown at token 0"
    assert forks(calls_of(A1, ([1, 2], [5])))[1] == "edited_history at token 2"


# Properties

token = st.integers(0, 1)
tokens = st.lists(token, max_size=5)
turn = st.tuples(st.lists(token, min_size=1, max_size=8), tokens)


@st.composite
def runs(draw):
    """Calls over two tokens, many of which extend an earlier one."""
    calls: list[Call] = []
    for k in range(draw(st.integers(1, 8))):
        prompt, output = draw(turn)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = [*earlier.prompt_ids, *earlier.output_ids, *draw(tokens)]
        calls.append(
            call(
                f"c{k}",
                prompt,
                output,
                started=float(k),
                agent=draw(st.sampled_from(["", "x"])),
                temperature=draw(st.sampled_from([1.0, 0.5])),
                outcome=draw(st.sampled_from(["complete", "complete", "cancelled"])),
            )
        )
    return calls


def longest_prefix(calls: Sequence[Call], k: int) -> set[int | None]:
    """Reference: all earlier calls whose tokens are the longest prefix of call k's prompt."""
    prompt = calls[k].prompt_ids.tolist()
    found: dict[int, set[int | None]] = {}
    for j in range(k):
        whole = [*calls[j].prompt_ids.tolist(), *calls[j].output_ids.tolist()]
        if len(calls[j].output_ids) and prompt[: len(whole)] == whole:
            found.setdefault(len(whole), set()).add(j)
    return found[max(found)] if found else {None}


@given(runs())
def test_parent_is_the_longest_prefix(calls):
    for k, node in enumerate(tree.build(calls).nodes):
        candidates = longest_prefix(calls, k)
        assert node.parent in candidates
        if any(j is not None and calls[j].agent == calls[k].agent for j in candidates):
            assert node.parent is not None and calls[node.parent].agent == calls[k].agent


@given(runs())
def test_every_sampled_token_is_trained_exactly_once(calls):
    grown = tree.build(calls)
    wanted = {c.id: c for c in calls if c.left_out is None}
    samples = tree.samples(grown, "run", set(wanted))
    assert len({s.sample_id for s in samples}) == len(samples)
    seen: dict[str, int] = dict.fromkeys(wanted, 0)
    for sample in samples:
        masked = np.zeros(len(sample.token_ids), dtype=bool)
        for call_id in sample.calls:
            one = next(c for c in calls if c.id == call_id)
            cut = slice(len(one.prompt_ids), one.end)
            assert sample.token_ids[: one.end].tolist() == [*one.prompt_ids, *one.output_ids]
            if sample.loss_mask[cut].any():
                assert sample.loss_mask[cut].all()
                assert sample.logprobs[cut].tolist() == one.logprobs.tolist()
                assert one.temperature == sample.temperature
                seen[call_id] += 1
                masked[cut] = True
        assert masked.tolist() == sample.loss_mask.tolist()
        assert sample.loss_mask.any()
    assert seen == dict.fromkeys(wanted, 1)


@given(runs())
def test_number_of_samples_is_the_number_of_trained_leaves(calls):
    grown = tree.build(calls)
    wanted = {c.id for c in calls if c.left_out is None}
    leaves = 0
    for k, node in enumerate(grown.nodes):
        below = [
            n.call
            for j, n in enumerate(grown.nodes)
            if j != k and k in grown.path(j) and n.call.temperature == node.call.temperature
        ]
        leaves += node.call.id in wanted and not any(c.id in wanted for c in below)
    assert len(tree.samples(grown, "run", wanted)) == leaves


def test_time_grows_with_tokens_not_with_pairs_of_calls():
    """2,000 calls that do not extend each other: comparing all pairs would take minutes."""
    generator = np.random.default_rng(0)
    calls = [
        call(f"c{k}", generator.integers(0, 9, 50 + k % 40), [1, 2, 3], started=float(k))
        for k in range(2000)
    ]
    began = time.perf_counter()
    grown = tree.build(calls)
    assert time.perf_counter() - began < 5
    assert sum(n.parent is None for n in grown.nodes) == 2000
    assert grown.nodes[0].fork is not None and grown.nodes[0].fork.reason is ForkReason.ROOT
