"""What the tap knows about one HTTP call, and the calls it remembers for a while.

Pure bookkeeping: no vLLM, no HTTP. All methods run on the API server's event loop.
"""

import asyncio
import base64
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenization.tap import wire

RETENTION_S = 60.0
MAX_FINISHED_CALLS = 4096
MAX_FINISHED_BYTES = 64 * 2**20


class Output:
    """One sampled sequence of one engine request of a call.

    Tokens are gathered until the call is drained, so that a reply which is not streamed costs one
    line per weight version, not one per token.
    """

    def __init__(self, call: "Call", request: int, index: int) -> None:
        self.call = call
        self.request = request
        self.index = index
        self.count = 0
        self.cached: int | None = None
        self.error: str | None = None
        self.ended = False
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._version = ""

    def tokens(self, ids: list[int], logprobs: list[float], version: str) -> None:
        """Add sampled tokens, their natural-log probabilities and the weight version of all."""
        if version != self._version:
            self.flush()
            self._version = version
        self._ids += ids
        self._logprobs += logprobs
        self.count += len(ids)

    def experts(self, routed: npt.NDArray[Any]) -> None:
        """Add the routed experts of prompt and output: integers, shape [tokens, layers, top k]."""
        self.flush()
        self._emit(
            "experts",
            shape=list(routed.shape),
            dtype=str(routed.dtype),
            b64=base64.b64encode(np.ascontiguousarray(routed)).decode("ascii"),
        )

    def fail(self, reason: str) -> None:
        """Mark the output as not to be trusted; its ``end`` will say ``error``. First one wins."""
        self.error = self.error or reason

    def end(self, finish: str, count: int) -> None:
        """Close the output. ``count`` is the number of tokens the engine says it returned."""
        if self.ended:
            return
        self.flush()
        if count != self.count:
            self.fail(f"the engine returned {count} tokens, the tap saw {self.count}")
        event: dict[str, Any] = {"n": count, "finish": finish, "cached": self.cached}
        if self.error is not None:
            event |= {"finish": "error", "error": self.error}
        self._emit("end", **event)
        self.ended = True
        self.call.settle()

    def flush(self) -> None:
        if self._ids:
            self._emit("tok", ids=self._ids, lp=self._logprobs, v=self._version)
            self._ids, self._logprobs = [], []

    def _emit(self, kind: str, **fields: Any) -> None:
        self.call.emit({"e": kind, "r": self.request, "i": self.index, **fields})


class Call:
    """One tapped HTTP call: its engine requests, their outputs, and the tap lines so far."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.outputs: list[Output] = []
        self.answered = False
        """The HTTP handler has returned: no further engine request will come."""
        self.settled = asyncio.Event()
        """Answered, and every output has ended."""
        self._requests: dict[str, int] = {}
        self._lines: list[bytes] = []
        self._sent = 0

    @property
    def tapped(self) -> bool:
        """Whether the call has reached the engine."""
        return bool(self._requests)

    def output(
        self,
        request_key: str,
        index: int,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
    ) -> Output:
        """Register an output, and with the first one of ``request_key`` the engine request."""
        request = self._requests.get(request_key)
        if request is None:
            request = self._requests[request_key] = len(self._requests)
            self.emit(
                {"e": "prompt", "r": request, "id": request_id, "ids": prompt_ids, "params": params}
            )
        output = Output(self, request, index)
        self.outputs.append(output)
        return output

    def emit(self, event: dict[str, Any]) -> None:
        self._lines.append(wire.line(self.nonce, event))

    def drain(self) -> bytes:
        """Return the tap lines that were not returned before."""
        self._flush()
        lines = b"".join(self._lines[self._sent :])
        self._sent = len(self._lines)
        return lines

    def events(self) -> bytes:
        """Return all events so far, one JSON document a line, without the tap prefix."""
        self._flush()
        prefix = len(self.nonce) + 3
        return b"".join(line[prefix:] for line in self._lines)

    def size(self) -> int:
        return sum(map(len, self._lines))

    def settle(self) -> None:
        if self.answered and all(output.ended for output in self.outputs):
            self.settled.set()

    def _flush(self) -> None:
        for output in self.outputs:
            output.flush()


class Calls:
    """Calls by nonce: all live ones, and the finished ones of the last minute, within bounds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: dict[str, Call] = {}
        self._finished: deque[tuple[float, Call, int]] = deque()
        self._bytes = 0

    def open(self, nonce: str) -> Call:
        """Start a call. A nonce that is used again replaces the call that had it."""
        call = self._calls[nonce] = Call(nonce)
        return call

    def finish(self, call: Call) -> None:
        """The HTTP handler of ``call`` has returned: keep it for ``RETENTION_S`` at most."""
        call.answered = True
        call.settle()
        size = call.size()
        self._bytes += size
        self._finished.append((self._clock(), call, size))
        self._evict()

    def get(self, nonce: str) -> Call | None:
        self._evict()
        return self._calls.get(nonce)

    def _evict(self) -> None:
        oldest_kept = self._clock() - RETENTION_S
        while self._finished and (
            self._finished[0][0] < oldest_kept
            or len(self._finished) > MAX_FINISHED_CALLS
            or self._bytes > MAX_FINISHED_BYTES
        ):
            _, call, size = self._finished.popleft()
            self._bytes -= size
            if self._calls.get(call.nonce) is call:
                del self._calls[call.nonce]
