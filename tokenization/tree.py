"""A run's calls as one tree keyed by token ids, and the training samples read off it.

A call extends a node when that node's prompt and output ids are a prefix of the call's prompt ids;
the longest such node wins. Nothing but ids decides what merges: equal text may have other tokens.
Every other call opens a branch, and the branch has a reason.

A sample is a path through the tree. Each sampled token is trained in exactly one sample and is
masked context in the others, so that n calls that extend each other cost one sequence instead of
n overlapping ones.
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tokenization.calls import Call, IntArray
from tokenization.sample import Sample


class ForkReason(StrEnum):
    """Why a call opened a branch instead of continuing the latest one."""

    ROOT = "root"
    """The run's first call."""
    SUBAGENT = "subagent"
    """First call of another agent or thread id."""
    SIDE_CALL = "side_call"
    """Other system prompt or tools than the calls before (titles, summaries, nested agents)."""
    RETRY = "retry"
    """Same prompt again after an attempt that failed or was cancelled."""
    REPEAT = "repeat"
    """Same prompt again although the first attempt was sound (several choices, resampling)."""
    COMPACTION = "compaction"
    """The history was replaced by a shorter one."""
    REASONING_STRIPPED = "reasoning_stripped"
    """Same dialogue, but earlier reasoning is no longer in the prompt."""
    DRIFT = "drift"
    """Same dialogue, other tokens: the reply came back retokenized."""
    EDITED_HISTORY = "edited_history"
    """An earlier message was changed or taken back."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fork:
    """``position``: first token that differs from the call it was compared with, if any."""

    reason: ForkReason
    position: int | None = None

    def __str__(self) -> str:
        return self.reason if self.position is None else f"{self.reason} at token {self.position}"


@dataclass(frozen=True)
class Node:
    """A call in the tree. ``parent`` indexes ``Tree.nodes``; ``fork`` is None when the call is the
    first to continue its parent."""

    call: Call
    parent: int | None
    fork: Fork | None


@dataclass(frozen=True)
class Tree:
    """Nodes in order of their calls' start; a parent precedes its children."""

    nodes: tuple[Node, ...]

    def path(self, index: int) -> list[int]:
        """Return the node indices from the root to ``index``."""
        path = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.nodes[at].parent
        return path[::-1]


def build(calls: Iterable[Call]) -> Tree:
    """Put a run's calls into a tree.

    Time is linear in the prompt tokens read: prefixes are found by hash and then compared once.
    Calls without prompt ids have no place in it and are left out.
    """
    order = sorted(
        (call for call in calls if len(call.prompt_ids)),
        key=lambda call: (call.started, call.exchange, call.request_index, call.output_index),
    )
    nodes: list[Node] = []
    continued: set[int] = set()
    index = _PrefixIndex()
    lineages = _Lineages()
    for call in order:
        matches, prompt_hash = index.longest_prefixes(call.prompt_ids, nodes)
        # Equal paths happen when a call was repeated and said the same again.
        same_agent = [m for m in matches if nodes[m].call.agent == call.agent]
        parent = max(same_agent or matches, default=None)
        fork = None
        if parent is None or parent in continued:
            fork = lineages.classify(call, prompt_hash)
        if parent is not None:
            continued.add(parent)
        nodes.append(Node(call, parent, fork))
        index.add(len(nodes) - 1, call, prompt_hash)
        lineages.add(call, prompt_hash)
    return Tree(tuple(nodes))


def samples(tree: Tree, run: str, trained: Collection[str]) -> list[Sample]:
    """Return the samples that train the calls with the ids ``trained``, each token once.

    A path ends at the last trained call on it; other calls on the way are masked context. Calls of
    different temperatures are never trained in one sample, since a sample has one temperature.
    """
    wanted = [k for k, node in enumerate(tree.nodes) if node.call.id in trained]
    found: list[Sample] = []
    for temperature in sorted({tree.nodes[k].call.temperature for k in wanted}):
        group = {k for k in wanted if tree.nodes[k].call.temperature == temperature}
        paths = {leaf: tree.path(leaf) for leaf in _leaves(tree, group)}
        remaining = set(group)
        for path in paths.values():
            own = [k for k in path if k in remaining]
            remaining.difference_update(own)
            found.append(_sample(tree, path, own, run=run, number=len(found)))
    return found


def _leaves(tree: Tree, group: Collection[int]) -> list[int]:
    """Nodes of ``group`` that no other node of it lies below."""
    covered: set[int] = set()
    leaves = []
    for k in sorted(group, reverse=True):
        if k not in covered:
            leaves.append(k)
        at = tree.nodes[k].parent
        while at is not None and at not in covered:
            covered.add(at)
            at = tree.nodes[at].parent
    return leaves[::-1]


def _sample(
    tree: Tree, path: Sequence[int], own: Sequence[int], *, run: str, number: int
) -> Sample:
    leaf = tree.nodes[path[-1]].call
    mask = np.zeros(leaf.end, dtype=np.bool_)
    logprobs = np.full(leaf.end, np.nan, dtype=np.float32)
    versions = np.full(leaf.end, -1, dtype=np.int32)
    for k in own:
        call = tree.nodes[k].call
        cut = slice(len(call.prompt_ids), call.end)
        mask[cut], logprobs[cut], versions[cut] = True, call.logprobs, call.versions
    return Sample(
        sample_id=f"{run}/{number}",
        run=run,
        calls=tuple(tree.nodes[k].call.id for k in path),
        token_ids=np.concatenate([leaf.prompt_ids, leaf.output_ids]),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        temperature=leaf.temperature,
    )


class _PrefixIndex:
    """Finds the nodes whose prompt and output ids are a prefix of given ids.

    A sequence's hash is the sum of (id + 1) times a random odd 64-bit weight of its position,
    modulo 2**64: a cumulative sum gives the hashes of all prefixes at once. Equal hashes are only
    candidates; the ids are compared before a match counts.
    """

    _SEED = 0x51DEA

    def __init__(self) -> None:
        self._generator = np.random.default_rng(self._SEED)
        self._weights = np.empty(0, dtype=np.uint64)
        self._lengths: list[int] = []
        self._by_length: dict[int, dict[int, list[int]]] = {}

    def longest_prefixes(self, ids: IntArray, nodes: Sequence[Node]) -> tuple[list[int], int]:
        """Return all nodes of the longest matching length, and the hash of all of ``ids``."""
        hashes = self._hashes(ids, 0)
        for length in reversed(self._lengths[: bisect_right(self._lengths, len(ids))]):
            candidates = self._by_length[length].get(int(hashes[length - 1]), [])
            matches = [k for k in candidates if _is_prefix(nodes[k].call, ids)]
            if matches:
                return matches, int(hashes[-1])
        return [], int(hashes[-1])

    def add(self, node: int, call: Call, prompt_hash: int) -> None:
        """Register a node. A call without output is skipped: nothing continues it."""
        if not len(call.output_ids):
            return
        output_hash = int(self._hashes(call.output_ids, len(call.prompt_ids))[-1])
        value = (prompt_hash + output_hash) % 2**64
        if call.end not in self._by_length:
            insort(self._lengths, call.end)
            self._by_length[call.end] = {}
        self._by_length[call.end].setdefault(value, []).append(node)

    def _hashes(self, ids: IntArray, start: int) -> npt.NDArray[np.uint64]:
        stop = start + len(ids)
        if stop > len(self._weights):
            more = self._generator.integers(
                0, 2**63, size=max(stop, 1024), dtype=np.uint64, endpoint=False
            )
            self._weights = np.concatenate([self._weights, more * np.uint64(2) + np.uint64(1)])
        terms = (ids.astype(np.uint64) + np.uint64(1)) * self._weights[start:stop]
        return np.cumsum(terms, dtype=np.uint64)


def _is_prefix(call: Call, ids: IntArray) -> bool:
    cut = len(call.prompt_ids)
    return np.array_equal(ids[:cut], call.prompt_ids) and np.array_equal(
        ids[cut : call.end], call.output_ids
    )


class _Lineages:
    """What came before, by agent: the calls that a branch is compared with to name its reason."""

    def __init__(self) -> None:
        self._latest: dict[str, Call] = {}
        self._by_context: dict[tuple[str, str], Call] = {}
        self._by_prompt: dict[tuple[str, int, int], Call] = {}

    def add(self, call: Call, prompt_hash: int) -> None:
        self._latest[call.agent] = call
        self._by_prompt[call.agent, len(call.prompt_ids), prompt_hash] = call
        if call.dialogue is not None:
            self._by_context[call.agent, call.dialogue.context] = call

    def classify(self, call: Call, prompt_hash: int) -> Fork:
        if not self._latest:
            return Fork(ForkReason.ROOT)
        if call.agent not in self._latest:
            return Fork(ForkReason.SUBAGENT)
        same = self._by_prompt.get((call.agent, len(call.prompt_ids), prompt_hash))
        if same is not None and np.array_equal(same.prompt_ids, call.prompt_ids):
            return Fork(ForkReason.REPEAT if same.left_out is None else ForkReason.RETRY)
        if call.dialogue is None:
            return _classify_by_tokens(call, self._latest[call.agent])
        previous = self._by_context.get((call.agent, call.dialogue.context))
        if previous is None:
            return Fork(ForkReason.SIDE_CALL)
        return _classify_by_dialogue(call, previous)


def _classify_by_dialogue(call: Call, previous: Call) -> Fork:
    assert call.dialogue is not None and previous.dialogue is not None
    position = _first_difference(call, previous)
    said = previous.reply.items if previous.reply else ()
    history, items = previous.dialogue.items + said, call.dialogue.items
    if items[: len(history)] == history:
        reasoned = previous.dialogue.reasoned or bool(previous.reply and previous.reply.reasoned)
        reason = ForkReason.REASONING_STRIPPED if reasoned else ForkReason.DRIFT
        return Fork(reason, position)
    if len(items) < len(previous.dialogue.items) and history[: len(items)] != items:
        return Fork(ForkReason.COMPACTION, position)
    return Fork(ForkReason.EDITED_HISTORY, position)


def _classify_by_tokens(call: Call, previous: Call) -> Fork:
    """Without a dialogue (raw completions) only the place of the difference can tell."""
    position = _first_difference(call, previous)
    if position == 0:
        return Fork(ForkReason.UNKNOWN, position)
    if position >= len(previous.prompt_ids):
        return Fork(ForkReason.DRIFT, position)
    return Fork(ForkReason.EDITED_HISTORY, position)


def _first_difference(call: Call, previous: Call) -> int:
    """Position of the first prompt token that ``previous``'s prompt and output do not share."""
    for ids, offset in ((previous.prompt_ids, 0), (previous.output_ids, len(previous.prompt_ids))):
        ours = call.prompt_ids[offset : offset + len(ids)]
        different = np.flatnonzero(ours != ids[: len(ours)])
        if len(different):
            return offset + int(different[0])
        if len(ours) < len(ids):
            return offset + len(ours)
    return previous.end
