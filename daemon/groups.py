"""Which rollouts may be trained: pure decisions over the state of runs.

A group is the rollouts of one task; its rewards are each other's baseline. It is decided once, as
a whole: trained or skipped, with a reason either way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

INFRASTRUCTURE_FAILURE = "infrastructure_failure"


@dataclass(frozen=True)
class RunView:
    """What a decision needs to know of a run.

    ``ended``: Unix seconds, None while it goes on. ``settled``: its last records have been read.
    ``reward``: the combined reward, None while one is missing. ``trainable_calls``: calls with
    sound tokens.
    """

    id: str
    ended: float | None
    settled: bool
    status: str | None
    reward: float | None
    trainable_calls: int
    group_size: int | None = None


@dataclass(frozen=True)
class Policy:
    """Times in seconds; see the configuration keys of the same names."""

    reward_window: float
    group_wait: float
    skip_zero_variance: bool = True


@dataclass(frozen=True)
class Decision:
    """``rollouts`` are the runs to train, ``left_out`` maps the others to the reason.

    ``wait`` may carry a reason too: what is being waited for. ``ready_since`` is the end of the
    last run, in Unix seconds.
    """

    action: Literal["wait", "ready", "skip"]
    reason: str = ""
    rollouts: tuple[RunView, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    ready_since: float = 0.0


def fate(run: RunView, now: float, policy: Policy) -> str | None:
    """Return why a run is left out, ``"graded"`` when it can be trained, None to wait."""
    if run.ended is None or not run.settled:
        return None
    # A failure of the infrastructure says nothing about the model: no sample, not reward 0.
    if run.status == INFRASTRUCTURE_FAILURE:
        return INFRASTRUCTURE_FAILURE
    if not run.trainable_calls:
        return "no trainable call"
    if run.reward is not None:
        return "graded" if math.isfinite(run.reward) else "the sum of its rewards is not finite"
    return None if now < run.ended + policy.reward_window else "no reward inside the window"


def decide(runs: Sequence[RunView], now: float, policy: Policy) -> Decision:
    """Decide one group: wait for more, train the graded rollouts, or skip it."""
    fates = {run.id: fate(run, now, policy) for run in runs}
    waiting = [run for run in runs if fates[run.id] is None]
    if waiting:
        what = "to end" if any(run.ended is None for run in waiting) else "for its reward"
        return Decision("wait", f"{len(waiting)} of {len(runs)} runs still have {what}")
    last_end = max((run.ended for run in runs if run.ended is not None), default=now)
    wanted = max((run.group_size or 0 for run in runs), default=0)
    sound = sum(run.status != INFRASTRUCTURE_FAILURE for run in runs)
    if sound < wanted and now < last_end + policy.group_wait:
        return Decision("wait", f"{sound} of {wanted} rollouts have come")
    return settle(runs, fates, last_end, policy)


def settle(
    runs: Sequence[RunView], fates: dict[str, str | None], ready_since: float, policy: Policy
) -> Decision:
    """Decide over runs whose fates are all known."""
    graded = tuple(run for run in runs if fates[run.id] == "graded")
    left_out = {run.id: str(fates[run.id]) for run in runs if run not in graded}
    skipped = None
    if len(graded) < 2:
        why = ", ".join(sorted(set(left_out.values())))
        skipped = f"{len(graded)} of {len(runs)} rollouts usable, a baseline needs two ({why})"
    elif policy.skip_zero_variance and len({run.reward for run in graded}) == 1:
        skipped = f"zero reward variance (all {graded[0].reward:g})"
    if skipped is not None:
        left_out |= {run.id: f"group skipped: {skipped}" for run in graded}
        return Decision("skip", skipped, (), left_out, ready_since)
    return Decision("ready", "", graded, left_out, ready_since)
