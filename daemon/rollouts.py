"""A run's calls → its samples, and for every other call the reason why it is not trained."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from daemon import sidecalls
from daemon.retries import chain
from daemon.sidecalls import Turn
from tokenization import tree
from tokenization.calls import Call
from tokenization.sample import Sample


@dataclass(frozen=True)
class Limits:
    """``newest``: number of the version the step starts from; ``max_staleness`` in versions."""

    newest: int
    max_staleness: int
    max_tokens: int


@dataclass(frozen=True)
class Selection:
    """``left_out`` and ``forks`` map call ids to reasons; ``trained`` lists the other calls."""

    samples: tuple[Sample, ...]
    trained: tuple[str, ...]
    left_out: dict[str, str]
    forks: dict[str, str]

    @property
    def sampled_tokens(self) -> int:
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)


def select(run: str, calls: Sequence[Call], waiting: Collection[str], limits: Limits) -> Selection:
    """Build the run's samples from its ``waiting`` calls that keep the limits.

    All ``calls`` take part in the tree, so that a call that is not trained can still be context.
    """
    grown = tree.build(calls)
    left_out: dict[str, str] = {}
    trained = []
    for call in calls:
        if call.id not in waiting:
            continue
        if reason := _beyond(call, limits):
            left_out[call.id] = reason
        else:
            trained.append(call.id)
    samples = tree.samples(grown, run, frozenset(trained))
    forks = {node.call.id: str(node.fork) for node in grown.nodes if node.fork is not None}
    return Selection(tuple(samples), tuple(trained), left_out, forks)


def beside_the_agent(calls: Sequence[Call], tools: Mapping[str, int]) -> frozenset[str]:
    """Return the calls of a run that ``sidecalls.without_tools`` finds; ``tools`` maps call ids to
    the number of tools they were offered."""
    if not any(tools.values()) or all(tools.get(call.id) for call in calls):
        return frozenset()
    turns = []
    for call in calls:
        history = chain(call.dialogue.items) if call.dialogue else ()
        turns.append(Turn(call.id, tools.get(call.id, 0), history))
    return sidecalls.without_tools(turns)


def _beyond(call: Call, limits: Limits) -> str | None:
    if reason := call.left_out:
        return reason
    if call.end > limits.max_tokens:
        return f"too long (more than {limits.max_tokens} tokens)"
    oldest, newest = int(call.versions.min()), int(call.versions.max())
    if newest > limits.newest:
        return f"sampled by a version that this daemon does not have (newer than v{limits.newest})"
    if limits.newest - oldest > limits.max_staleness:
        return f"stale (more than {limits.max_staleness} versions old)"
    return None
