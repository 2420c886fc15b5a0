"""Settings of publishing weights into a serving engine."""

from typing import Annotated

import msgspec

Seconds = float


class SwapConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section ``[swap]``."""

    admin_timeout_s: Annotated[
        Seconds,
        msgspec.Meta(description="Longest wait for pause, resume and other short calls.", gt=0),
    ] = 30.0
    update_timeout_s: Annotated[
        Seconds,
        msgspec.Meta(description="Longest wait for the engine to load a version.", gt=0),
    ] = 600.0
    canary_timeout_s: Annotated[
        Seconds,
        msgspec.Meta(description="Longest wait for the canary prompt's log-probs.", gt=0),
    ] = 120.0
    resume_attempts: Annotated[
        int,
        msgspec.Meta(description="How often to try to resume a paused engine.", ge=1),
    ] = 5
    canary_tolerance_float32: Annotated[
        float,
        msgspec.Meta(
            description="Largest mean absolute difference of canary log-probs (nats) between "
            "trainer and an engine that serves in float32.",
            gt=0,
        ),
    ] = 5e-4
    canary_tolerance_half: Annotated[
        float,
        msgspec.Meta(
            description="The same for an engine that serves in bfloat16 or float16.", gt=0
        ),
    ] = 5e-2
    orphan_poll_s: Annotated[
        Seconds,
        msgspec.Meta(
            description="How often to look for an engine that was left paused; it is resumed when "
            "found so twice in a row.",
            gt=0,
        ),
    ] = 10.0
