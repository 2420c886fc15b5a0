"""The ``[sidecar]`` section of the configuration."""

from typing import Annotated

from msgspec import Meta, Struct


class SidecarConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Every key has a default: a sidecar beside a vLLM on its usual port needs no configuration."""

    upstream: Annotated[
        str,
        Meta(
            description="Model server the agent's requests go to: http or https, with or without "
            "a path prefix."
        ),
    ] = "http://127.0.0.1:8000"
    listen: Annotated[
        str,
        Meta(
            description="Loopback address the agent connects to. Port 0 takes a free port. Unused "
            "when a listening socket is inherited (LISTEN_FDS)."
        ),
    ] = "127.0.0.1:8787"
    admin: Annotated[
        str,
        Meta(description="Loopback address of /healthz and /metrics. Port 0 takes a free port."),
    ] = "127.0.0.1:8788"
    traces: Annotated[str, Meta(description="Folder the trace shards are written to.")] = "traces"
    tap: Annotated[
        bool,
        Meta(description="Ask the engine's token tap for exact tokens with every model call."),
    ] = True
    rotate_mib: Annotated[
        int,
        Meta(ge=1, description="A shard that has reached this size (MiB) is followed by a new."),
    ] = 256
    rotate_seconds: Annotated[
        int, Meta(ge=1, description="A shard of this age (seconds) is followed by a new one.")
    ] = 3600
    queue_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="Records (MiB) kept in memory while they can't be written; what comes on "
            "top of that is counted as lost.",
        ),
    ] = 256
    drain_seconds: Annotated[
        float,
        Meta(ge=0, description="Seconds that calls in flight are given to end after SIGTERM."),
    ] = 30.0
