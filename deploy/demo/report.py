"""What the demo found: ``report.json``, a table for the terminal and a plot. Pure but for files."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from deploy.demo.bystander import Reply
from deploy.demo.journal import Attempt
from deploy.demo.settings import Settings

LEAST_RATIO, LEAST_RISE = 1.5, 0.15
"""By how much the last quarter's mean reward must exceed the first's to have clearly risen."""
WINDOW_VERSIONS = 3

VERSION_KEYS = (
    "version",
    "reward_mean",
    "rollouts",
    "samples",
    "sampled_tokens",
    "staleness_max",
    "kl_rollout_trainer",
    "logprob_abs_diff_mean",
    "canary_abs_diff_mean",
    "swap_pause_s",
    "step_seconds",
    "tokens_per_second",
)

COUNTS = {"rollouts", "samples", "sampled_tokens", "staleness_max"}


def build(
    settings: Settings,
    attempts: Sequence[Attempt],
    bystander: Sequence[Reply],
    status: dict[str, Any],
    calls: Sequence[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """Return the report.

    Args:
        settings: what was run.
        attempts: all attempts at rollouts, in any order.
        bystander: the long replies that were streamed across swaps.
        status: the daemon's last status.
        calls: the daemon's calls of all these; ``versions`` lists [first token, version].
        seconds: how long it all took.
    """
    graded = sorted((a for a in attempts if a.reward is not None), key=lambda a: a.started)
    rewards = [a.reward for a in graded if a.reward is not None]
    first, last = quarters(rewards)
    gaps = [a.longest_gap_s for a in attempts] + [r.longest_gap_s for r in bystander]
    trained = [v for v in status["versions"] if v["step"] is not None and v["live_from"]]
    return {
        "seed": settings.seed,
        "steps": len(trained),
        "seconds": round(seconds, 1),
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "reward_risen": risen(first, last),
        "rollouts": len(graded),
        "rollouts_repeated": len(attempts) - len(graded),
        "agent_failures": sum(a.failure == "agent" for a in attempts),
        "checks": {key: status["checks"][key] for key in ("calls", "failed")},
        "logprob_abs_diff_mean": _weighted(
            trained, "logprob_abs_diff_mean", "logprob_compared_tokens"
        ),
        "swap_pause_s_max": max((v["swap_pause_s"] or 0.0 for v in trained), default=None),
        "longest_stream_gap_s": max(gaps, default=None),
        "streams_broken": [msgspec.to_builtins(r) for r in bystander if r.finish is None],
        "streams_across_swaps": [
            {"call": call["id"], "run": call["run"], "versions": call["versions"]}
            for call in calls
            if len(call["versions"]) > 1
        ],
        "versions": [
            {key: _count(key, version.get(key)) for key in VERSION_KEYS} for version in trained
        ],
        "settings": msgspec.to_builtins(settings),
    }


def _count(key: str, value: Any) -> Any:
    """Counts travel among the trainer's metrics as floats; in the report they are counts."""
    return int(value) if key in COUNTS and value is not None else value


def quarters(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean reward of the first and of the last quarter, None with fewer than four."""
    length = len(rewards) // 4
    if not length:
        return None, None
    return statistics.fmean(rewards[:length]), statistics.fmean(rewards[-length:])


def risen(first: float | None, last: float | None) -> bool:
    """Say whether the reward has clearly risen."""
    if first is None or last is None:
        return False
    return last >= LEAST_RATIO * first and last - first >= LEAST_RISE


def _weighted(versions: Sequence[dict[str, Any]], key: str, weight: str) -> float | None:
    """Return the mean of ``key`` weighted by tokens, over the versions that have both."""
    both = [(v[key], v[weight]) for v in versions if v.get(key) is not None and v.get(weight)]
    total = sum(tokens for _, tokens in both)
    return sum(value * tokens for value, tokens in both) / total if total else None


def write(report: dict[str, Any], directory: Path) -> None:
    """Write ``report.json`` and ``reward.png``."""
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, directory / "reward.png")


def table(report: dict[str, Any]) -> Table:
    """Return one row per version."""
    out = Table(
        title="versions and the rollouts they were trained on",
        title_justify="left",
        caption="stale: versions between sampling and training\n"
        "KL: of the policy that is trained from the one that sampled\n"
        "|Δlogp|: trainer against engine under the same weights",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    columns = (
        ("version", "version", "{}"),
        ("reward", "reward_mean", "{:.2f}"),
        ("rollouts", "rollouts", "{:.0f}"),
        ("samples", "samples", "{:.0f}"),
        ("tokens", "sampled_tokens", "{:.0f}"),
        ("stale", "staleness_max", "{:.0f}"),
        ("KL", "kl_rollout_trainer", "{:.1e}"),
        ("|Δlogp|", "logprob_abs_diff_mean", "{:.1e}"),
        ("pause s", "swap_pause_s", "{:.2f}"),
        ("step s", "step_seconds", "{:.0f}"),
    )
    for name, _, _ in columns:
        out.add_column(name, justify="right", no_wrap=True)
    for version in report["versions"]:
        out.add_row(
            *(
                "-" if version[key] is None else form.format(version[key])
                for _, key, form in columns
            )
        )
    return out


def summary(report: dict[str, Any]) -> list[str]:
    """Return the findings in sentences."""
    checks, gap = report["checks"], report["longest_stream_gap_s"] or 0.0
    lines = [
        f"{report['steps']} steps, {report['rollouts']} rollouts in {report['seconds'] / 60:.1f} "
        f"minutes; {checks['calls']} model calls checked, {checks['failed']} failed"
    ]
    if report["logprob_abs_diff_mean"] is not None:
        lines.append(
            "log-probabilities, trainer against engine: mean absolute difference "
            f"{report['logprob_abs_diff_mean']:.1e}"
        )
    lines.append(
        f"{len(report['streams_across_swaps'])} streams went on across a swap of the weights, "
        f"{len(report['streams_broken'])} broke; the longest wait inside any stream was "
        f"{gap:.1f} s (the trainer works on the same cores)"
    )
    if report["reward_first_quarter"] is not None:
        lines.append(
            f"mean reward of the first quarter of rollouts {report['reward_first_quarter']:.2f}, "
            f"of the last quarter {report['reward_last_quarter']:.2f}"
            + ("" if report["reward_risen"] else ": no clear rise (a short run can't show one)")
        )
    return lines


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw reward by version with its moving average, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    rewards = [v["reward_mean"] for v in report["versions"]]
    steps = range(1, len(rewards) + 1)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, rewards, "o", color="#9db4c8", label="rollouts of one step")
    if len(rewards) >= WINDOW_VERSIONS:
        axes.plot(
            steps,
            moving_average(rewards, WINDOW_VERSIONS),
            color="#1f5f8b",
            linewidth=2.5,
            label=f"mean of {WINDOW_VERSIONS} steps",
        )
    axes.set(
        xlabel="training step",
        ylabel="mean reward",
        ylim=(0, 1.05),
        title=f"Reward of the agent while its model is trained (seed {report['seed']})",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` before it."""
    return [statistics.fmean(values[max(0, k + 1 - window) : k + 1]) for k in range(len(values))]
