"""The daemon's section of the configuration file."""

from typing import Annotated, Literal

import msgspec

SideCall = Literal[
    "count_tokens",
    "title",
    "quota_probe",
    "memory",
    "commit_message",
    "compaction",
    "no_tools",
]
"""``no_tools``: see ``daemon.sidecalls.without_tools``. ``compaction``: the history is
summarised, to go on with the summary in its place."""


class DaemonConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[daemon]``: where traces come from, when a run is over, what goes into a step."""

    traces: Annotated[
        str, msgspec.Meta(description="Folder of trace shards that the sidecars write.")
    ] = "traces"
    directory: Annotated[
        str,
        msgspec.Meta(description="Folder of the daemon's state, batches, weights and checkpoints."),
    ] = "state"
    listen: Annotated[
        str, msgspec.Meta(description="Loopback address HOST:PORT of the daemon's HTTP API.")
    ] = "127.0.0.1:8790"
    engine: Annotated[
        str, msgspec.Meta(description="URL of the vLLM server whose weights are swapped.")
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str, msgspec.Meta(description="Model folder training starts from; what the engine serves.")
    ] = "model"
    train: Annotated[
        bool,
        msgspec.Meta(description="False: only read traces and answer for them, never train."),
    ] = True
    poll_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, description="Look for new trace data at least this often (seconds)."),
    ] = 1.0
    engine_poll_seconds: Annotated[
        float, msgspec.Meta(gt=0, description="Ask the engine for its state this often (seconds).")
    ] = 5.0
    idle_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, description="A run without a call for this long has ended (seconds)."),
    ] = 900.0
    settle_seconds: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            description="Wait this long after a run's end for its last records (seconds).",
        ),
    ] = 1.0
    reward_window_seconds: Annotated[
        float,
        msgspec.Meta(ge=0, description="Rewards are accepted this long after a run's end."),
    ] = 600.0
    group_wait_seconds: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            description="A group short of rollouts waits this long for replacements (seconds).",
        ),
    ] = 600.0
    groups_per_step: Annotated[
        int, msgspec.Meta(ge=1, description="Groups in one training step.")
    ] = 4
    runs_per_step: Annotated[
        int,
        msgspec.Meta(ge=2, description="Runs in one training step of traffic without groups."),
    ] = 32
    max_wait_seconds: Annotated[
        float,
        msgspec.Meta(
            gt=0,
            description="A step starts with fewer groups (or runs) once the oldest waited so long.",
        ),
    ] = 600.0
    max_staleness: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            description="Calls with a token sampled more versions ago than this are not trained.",
        ),
    ] = 4
    max_sequence_tokens: Annotated[
        int,
        msgspec.Meta(ge=2, description="Calls that end beyond this many tokens are not trained."),
    ] = 32768
    train_side_calls: Annotated[
        list[SideCall],
        msgspec.Meta(
            description="Kinds of side calls that are trained like the agent's own: title, "
            "quota_probe, memory, commit_message, compaction, no_tools."
        ),
    ] = []
    redact: Annotated[
        list[str],
        msgspec.Meta(
            description="Regular expressions of what `ridealong traces show` and `export` write "
            "as [REDACTED]; `cat` writes records as they are. A call in whose texts one finds "
            "something is not trained."
        ),
    ] = []
    skip_zero_variance: Annotated[
        bool,
        msgspec.Meta(description="Skip groups whose rewards are all equal: their advantage is 0."),
    ] = True
    trainer_restart_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, description="Pause before a trainer that died is started again."),
    ] = 2.0
