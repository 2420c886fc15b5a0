"""Makes calls for tests of the tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sidecar.traces.record import Outcome
from tokenization.calls import Call, Dialogue, Reply
from tokenization.checks import Failure


def call(
    name: str,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    started: float,
    agent: str = "",
    temperature: float = 1.0,
    outcome: Outcome = "complete",
    failures: tuple[Failure, ...] = (),
    dialogue: Dialogue | None = None,
    reply: Reply | None = None,
    version: int = 0,
) -> Call:
    params: dict[str, Any] = {"temperature": temperature}
    return Call(
        id=name,
        exchange=name,
        agent=agent,
        started=started,
        ended=started + 0.5,
        outcome=outcome,
        request_index=0,
        output_index=0,
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        output_ids=np.asarray(output, dtype=np.int32),
        logprobs=-np.arange(1, len(output) + 1, dtype=np.float32) - started,
        versions=np.full(len(output), version, dtype=np.int32),
        finish="stop",
        params=params,
        failures=failures,
        dialogue=dialogue,
        reply=reply,
    )
