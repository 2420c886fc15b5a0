"""The mitmproxy addon that ties exchanges to ``Call`` objects and hands on their records.

Hook methods are named and called as mitmproxy's event hooks are documented. The two callables that
see body pieces must be synchronous, must not raise (mitmproxy would drop the piece) and must never
return ``b""`` (it would end a chunked message): they return ``[]`` instead.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from mitmproxy import http
from mitmproxy.connection import Client, ConnectionState

from sidecar import routes
from sidecar.call import Call, Headers, new_nonce
from sidecar.metrics import Metrics
from sidecar.record import Outcome, Record, Session
from tokenization.tap import wire

_log = logging.getLogger(__name__)

SESSION_HEADER = "x-ridealong-session"
# How long the end of a reply waits for its record to be in the shard. Normally a millisecond; after
# a wait in vain nobody waits until that record is written.
_COMMIT_SECONDS = 1.0

Piece = bytes | list[bytes]


class Sink(Protocol):
    """Takes records; ``sidecar.writer.Writer``."""

    def put(self, record: Record, done: Callable[[], None] | None = None) -> bool:
        """Queue a record; call ``done``, in any thread, when there is nothing more to wait for."""

    def lose(self, reason: str) -> None:
        """Count a record that could not be made or taken."""


class Puller(Protocol):
    """Fetches tokens; ``sidecar.tapclient.TapClient``."""

    async def pull(self, nonce: str, authorization: str | None) -> list[str] | None:
        """Return the tap's lines of a call after its end, None if there are none."""


class Capture:
    """Tees every exchange off and changes nothing that the agent sees.

    The last bytes of a model call's reply go to the agent only when its record is in the shard: a
    call that the agent saw complete is not lost, whatever happens to this process then.
    """

    def __init__(
        self,
        upstream: str,
        prefix: str,
        tap: bool,
        sink: Sink,
        puller: Puller,
        write: Callable[[http.HTTPFlow, bytes], None],
        metrics: Metrics,
    ) -> None:
        """``upstream``: the model server's URL, for the records; ``prefix``: its path prefix;
        ``write``: sends bytes of a reply's body to the client at once.
        """
        self.untapped_in_a_row = 0
        """Model calls answered without the tokens that were asked for, since one that had them."""
        self._upstream = upstream
        self._prefix = prefix
        self._tap = tap
        self._sink = sink
        self._puller = puller
        self._write = write
        self._metrics = metrics
        self._commit_overdue = False
        self._calls: dict[str, tuple[Call, http.HTTPFlow]] = {}
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Exchanges going on, and cancelled ones whose tokens are being fetched."""
        return len(self._calls) + len(self._pulls)

    def busy_connections(self) -> set[str]:
        """Return mitmproxy's ids of the client connections that have an exchange going on."""
        return {flow.client_conn.id for _, flow in self._calls.values()}

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        flow.request.stream = True
        try:
            self._begin(flow)
        except Exception:
            self._fault("a request is not captured")

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        assert flow.response is not None
        flow.response.stream = True
        call = self._call(flow)
        if call is None:
            return
        try:
            length = call.begin_reply(
                flow.response.status_code,
                _fields(flow.response.headers),
                flow.response.timestamp_start or time.time(),
            )
            if length is not None:
                flow.response.headers["content-length"] = str(length)
            if call.nonce is not None:
                flow.response.headers.pop(wire.LENGTH_HEADER, None)
        except Exception:
            self._fault("a reply is not captured")
            return
        if call.route != "other":
            flow.response.stream = self._reply_stream(call)

    async def response(self, flow: http.HTTPFlow) -> None:
        call = self._call(flow)
        if call is None:
            return
        try:
            if call.route == "other":
                self._end(call, "complete")
            else:
                await self._end_committed(call, "complete")
        finally:
            if call.rest:
                self._write(flow, call.rest)
            self._release(flow)

    async def error(self, flow: http.HTTPFlow) -> None:
        call = self._call(flow)
        headers_sent = call is not None and call.status is not None
        if call is not None:
            message = flow.error.msg if flow.error else "unknown"
            try:
                if not flow.client_conn.state & ConnectionState.CAN_READ:
                    self._end_hung_up(call, message)
                else:
                    await self._end_broken_off(call, flow, message)
            finally:
                self._release(flow)
        if not headers_sent and flow.killable:
            # mitmproxy would answer with an error page of its own. Without a sidecar the agent
            # would see a connection that breaks, which its SDK retries.
            flow.kill()

    def client_disconnected(self, client: Client) -> None:
        """Let go of what neither ``response`` nor ``error`` was called for.

        mitmproxy calls neither when it fails itself, as it does on HTTP/1 trailers.
        """
        for call, flow in list(self._calls.values()):
            if flow.client_conn.id == client.id:
                self._end_hung_up(call, "the client's connection ended before the exchange did")
                self._release(flow)

    def websocket_message(self, flow: http.HTTPFlow) -> None:
        if flow.websocket is not None:
            flow.websocket.messages.clear()  # mitmproxy would keep them all.

    def stop(self) -> None:
        """Record what is still going on as cut off by the sidecar's end."""
        for call, _ in self._calls.values():
            self._end(call, "sidecar_stopped")
        self._calls.clear()

    async def finish_pulls(self) -> None:
        """Wait for the tokens of cancelled calls; every fetch is bounded."""
        while self._pulls:
            await asyncio.wait(self._pulls)

    def _begin(self, flow: http.HTTPFlow) -> None:
        request = flow.request
        target = request.data.path.decode("latin-1")
        run, rest = routes.split_run(target)
        method = request.data.method.decode("latin-1")
        route = routes.route(method, rest)
        path = self._prefix + rest if rest.startswith("/") else rest
        asked = _fields(request.headers)
        headers = [(name, value) for name, value in asked if name.lower() != wire.HEADER]
        session = ", ".join(value for name, value in asked if name.lower() == SESSION_HEADER)
        nonce = new_nonce() if self._tap and route != "other" else None
        host, port, *_ = flow.client_conn.peername or ("", 0)
        call = Call(
            route=route,
            session=Session(run, session or None, f"{host}:{port}"),
            method=method,
            path=path,
            headers=headers,
            nonce=nonce,
            started=request.timestamp_start,
        )
        self._calls[flow.id] = call, flow
        self._metrics.in_flight.set(self.in_flight)

        if path != target:
            request.data.path = path.encode("latin-1")
        if len(headers) != len(asked):
            del request.headers[wire.HEADER]
        if route == "other":
            return
        # Compressed replies could not be cut.
        request.headers["accept-encoding"] = "identity"
        if nonce is not None:
            request.headers[wire.HEADER] = nonce
        request.stream = self._request_stream(call)

    def _request_stream(self, call: Call) -> Callable[[bytes], Piece]:
        def stream(data: bytes) -> Piece:
            try:
                call.request_chunk(data)
            except Exception:
                self._fault("a request is captured in part")
            return data or []

        return stream

    def _reply_stream(self, call: Call) -> Callable[[bytes], Piece]:
        def stream(data: bytes) -> Piece:
            if call.fault is not None:
                return data or []
            held = call.held
            try:
                if data:
                    return call.reply_chunk(data) or []
                call.end_reply()
            except Exception as error:
                call.fault = f"the sidecar failed to capture the reply: {error!r}"
                self._fault("a reply goes on as it comes from upstream")
                return held + data or []
            return []

        return stream

    def _end(self, call: Call, outcome: Outcome, error: str | None = None) -> None:
        """Record a call, unless it has been."""
        if not call.recorded:
            self._record(call, outcome, time.time(), error)

    async def _end_committed(self, call: Call, outcome: Outcome, error: str | None = None) -> None:
        """Record a call, unless it has been, and wait until the record is in the shard."""
        if not call.recorded:
            committed = asyncio.get_running_loop().create_future()
            self._record(call, outcome, time.time(), error, committed)
            await committed

    async def _end_broken_off(self, call: Call, flow: http.HTTPFlow, error: str) -> None:
        """Record a call whose upstream has gone; the client gets what was held back for it."""
        if call.held and call.fault is None:
            call.end_reply()
        if not call.rest:
            self._end(call, "upstream_error", error)
            return
        try:
            await self._end_committed(call, "upstream_error", error)
        finally:
            self._write(flow, call.rest)

    def _end_hung_up(self, call: Call, error: str) -> None:
        """Record a call whose client has gone."""
        if call.nonce is not None:
            self._end_after_pull(call, error)
        else:
            self._end(call, "complete" if call.agent_saw_the_end() else "cancelled", error)

    def _end_after_pull(self, call: Call, error: str) -> None:
        """Record a call whose client has gone, with the tokens it had still produced."""
        if call.recorded:
            return
        ended = time.time()

        async def pull() -> None:
            assert call.nonce is not None
            call.pulled = await self._puller.pull(call.nonce, call.authorization)
            outcome: Outcome = "complete" if call.agent_saw_the_end() else "cancelled"
            self._record(call, outcome, ended, error)

        task = asyncio.create_task(pull())
        self._pulls.add(task)
        task.add_done_callback(self._pulled)

    def _pulled(self, task: "asyncio.Task[None]") -> None:
        self._pulls.discard(task)
        self._metrics.in_flight.set(self.in_flight)

    def _record(
        self,
        call: Call,
        outcome: Outcome,
        ended: float,
        error: str | None,
        committed: "asyncio.Future[None] | None" = None,
    ) -> None:
        """Hand a call's record on; ``committed`` is done when there is nothing to wait for."""
        call.recorded = True
        done = self._commit(committed) if committed is not None else None
        try:
            record = call.record(outcome, self._upstream, ended, error)
            self._sink.put(record, done)
        except Exception as failure:
            self._fault("a record is lost")
            # The message of an encoding error quotes what it could not encode.
            self._sink.lose(f"a record could not be made: {type(failure).__name__}")
            if done is not None:
                done()
            return
        self._metrics.ended(call, outcome, ended - record.started)
        if outcome == "complete" and call.nonce is not None and call.status == 200:
            if call.tap_lines:
                self.untapped_in_a_row = 0
            else:
                self.untapped_in_a_row += 1
                self._metrics.untapped.inc()

    def _commit(self, committed: "asyncio.Future[None]") -> Callable[[], None]:
        """Return what the sink is to call; ``committed`` is also done after a time limit."""
        loop = asyncio.get_running_loop()

        def release(overdue: bool) -> None:
            timer.cancel()
            self._commit_overdue = overdue
            if not committed.done():
                committed.set_result(None)

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # The loop may have ended.
                loop.call_soon_threadsafe(release, False)

        limit = 0 if self._commit_overdue else _COMMIT_SECONDS
        timer = loop.call_later(limit, release, True)
        return done

    def _release(self, flow: http.HTTPFlow) -> None:
        self._calls.pop(flow.id, None)
        self._metrics.in_flight.set(self.in_flight)

    def _call(self, flow: http.HTTPFlow) -> Call | None:
        known = self._calls.get(flow.id)
        return known[0] if known else None

    def _fault(self, what: str) -> None:
        self._metrics.faults.inc()
        _log.exception("capturing failed, the traffic goes on: %s", what)


def _fields(headers: http.Headers) -> Headers:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.fields]
