"""The mitmproxy addon that ties exchanges to ``Call`` objects and hands on their records.

Hook methods are named and called as mitmproxy's event hooks are documented. The two callables that
see body pieces must be synchronous, must not raise (mitmproxy would drop the piece) and must never
return ``b""`` (it would end a chunked message): they return ``[]`` instead.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mitmproxy import http
from mitmproxy.connection import Client, ConnectionState
from mitmproxy.net.http import http1

from sidecar.access.admission import Access
from sidecar.access.keys import not_a_run
from sidecar.access.limits import discard_body
from sidecar.access.refusal import Refusal
from sidecar.bodies import coding
from sidecar.call import Call, Headers, new_nonce
from sidecar.operations.metrics import Metrics, Phase
from sidecar.routing import routes
from sidecar.routing.addresses import Upstream
from sidecar.routing.router import Plan, Router, Sent, address, set_body
from sidecar.routing.ways import way_of
from sidecar.tokens.sources import Sources
from sidecar.traces.record import Outcome, Record, Session
from tokenization.tap import wire

_log = logging.getLogger(__name__)

SESSION_HEADER = "x-ridealong-session"
# How long the end of a reply waits for its record to be in the shard. Normally a millisecond; after
# a wait in vain nobody waits until that record is written.
_COMMIT_SECONDS = 1.0

# What servers answer to an upgrade where they know no WebSocket: uvicorn 403, others as to a GET.
_NO_WEBSOCKET = frozenset({403, 404, 405, 501})

Piece = bytes | list[bytes]


class Sink(Protocol):
    """Takes records; ``sidecar.traces.writer.Writer``."""

    def put(self, record: Record, done: Callable[[], None] | None = None) -> bool:
        """Queue a record; call ``done``, in any thread, when there is nothing more to wait for."""

    def lose(self, reason: str) -> None:
        """Count a record that could not be made or taken."""


class Puller(Protocol):
    """Fetches tokens; ``sidecar.tokens.tapclient.TapClient``."""

    async def pull(self, upstream: str, nonce: str, authorization: str | None) -> list[str] | None:
        """Return the tap's lines of a call after its end, None if there are none."""


@dataclass
class _Exchange:
    """A call, the flow it is mitmproxy's name for, and where it goes."""

    call: Call
    flow: http.HTTPFlow
    plan: Plan
    since: float = 0.0
    """``time.perf_counter`` when its head was here."""
    sent: Sent | None = None
    """None while its body is waited for to route it."""
    to_splice: bool = False
    """Its body is waited for, to ask for tokens in it."""
    letting_go: asyncio.TimerHandle | None = None
    """Its stream's last event is held back until then at most."""


class Capture:
    """Tees every exchange off and changes nothing that the agent sees.

    The last bytes of a model call's reply go to the agent only when its record is in the shard: a
    call that the agent saw complete is not lost, whatever happens to this process then.
    """

    def __init__(
        self,
        router: Router,
        sources: Sources,
        sink: Sink,
        puller: Puller,
        write: Callable[[http.HTTPFlow, bytes], None],
        pass_reset_on: Callable[[http.HTTPFlow], bool],
        metrics: Metrics,
        access: Access,
    ) -> None:
        """``write``: sends bytes of a reply's body to the client at once; ``pass_reset_on``: makes
        the client's connection end as the upstream's did, and says whether that was a reset.
        """
        self.untapped_in_a_row = 0
        """Model calls answered without the tokens that were asked for, since one that had them."""
        self.access = access
        """Who may post what; another one may take its place at any time."""
        self._router = router
        self._sources = sources
        self._sink = sink
        self._puller = puller
        self._write = write
        self._pass_reset_on = pass_reset_on
        self._metrics = metrics
        self._commit_overdue = False
        self._committed: deque[Callable[[], None]] = deque()
        self._waking = False
        """The event loop has been told of them: one wake-up is enough for many."""
        self._exchanges: dict[str, _Exchange] = {}
        self._captured: set[str] = set()
        """Client connections whose last exchange was taken for one of ours."""
        self._sockets: dict[str, str] = {}
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Exchanges and WebSockets going on, and cancelled calls whose tokens are being fetched."""
        return len(self._exchanges) + len(self._sockets) + len(self._pulls)

    def idle_connections(self) -> set[str]:
        """Return mitmproxy's ids of the client connections that are between two exchanges."""
        return self._captured - self.busy_connections()

    def busy_connections(self) -> set[str]:
        """Return mitmproxy's ids of the client connections that have an exchange going on."""
        busy = {exchange.flow.client_conn.id for exchange in self._exchanges.values()}
        return busy | set(self._sockets.values())

    def replicas(self, client: str) -> list[Upstream]:
        """Return the model servers that may get what a client connection has just asked for."""
        sent = self._waiting(client)[1]
        return sent.replicas if sent is not None else []

    def redirect(self, client: str, replica: Upstream) -> None:
        """Send what a client connection has just asked for to another of its replicas."""
        flow, sent = self._waiting(client)
        if flow is not None and sent is not None:
            address(flow, sent, replica)
            self._went(flow, sent)

    def http_connect(self, flow: http.HTTPFlow) -> None:
        admission = self.access.connect(flow.request.headers.get("proxy-authorization"))
        if isinstance(admission, Refusal):
            self._refuse(flow, admission)
        else:
            self._router.connect(flow)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        since = time.perf_counter()
        flow.request.stream = True
        try:
            self._begin(flow)
        except Exception:
            self._fault("a request is not captured")
            if self.access.required and flow.id not in self._exchanges:
                self._refuse(flow, Refusal(500, "the sidecar failed to check the run key"))
        exchange = self._exchanges.get(flow.id)
        if exchange is not None:
            exchange.since = since
            if flow.request.stream:
                self._added("request", exchange.call, since)

    def request(self, flow: http.HTTPFlow) -> None:
        exchange = self._exchanges.get(flow.id)
        if exchange is None or (exchange.sent is None and flow.request.stream):
            return
        try:
            if exchange.sent is None:
                self._send_body(exchange)
            elif exchange.to_splice:
                exchange.call.request_chunk(flow.request.data.content or b"")
                self._ask_in_text(exchange)
        except Exception:
            self._fault("a request goes on as it came")
        if not flow.request.stream:
            self._added("request", exchange.call, exchange.since)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        since = time.perf_counter()
        assert flow.response is not None
        flow.response.stream = True
        exchange = self._exchanges.get(flow.id)
        if exchange is None:
            return
        call = exchange.call
        # It has been sent, and a waiting agent may have many of them.
        flow.request.data.content = b""
        try:
            if self._lacks_websocket(exchange):
                _answer_upgrade_required(flow.response)
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
        if call.whole:
            flow.response.stream = False
        elif call.route != "other":
            flow.response.stream = self._reply_stream(exchange)
        self._added("reply_head", call, since)

    async def response(self, flow: http.HTTPFlow) -> None:
        since = time.perf_counter()
        call = self._call(flow)
        # A reply without a length ends with its connection, and mitmproxy takes every end for one.
        framed = call is not None and call.framed
        reset = not framed and _ends_with_connection(flow) and self._pass_reset_on(flow)
        outcome: Outcome = "upstream_error" if reset else "complete"
        error = "the upstream reset the connection" if reset else None
        if call is None:
            return
        if call.whole:
            self._cut_whole(call, flow)
        try:
            if call.route == "other":
                self._end(call, outcome, error)
            else:
                await self._end_committed(call, outcome, error)
        finally:
            if call.rest:
                self._write(flow, call.rest)
            self._added("reply_end", call, since)
            self._release(flow)
            if flow.websocket is not None:
                self._sockets[flow.id] = flow.client_conn.id

    async def error(self, flow: http.HTTPFlow) -> None:
        call = self._call(flow)
        headers_sent = call is not None and call.status is not None and not call.whole
        if flow.client_conn.state & ConnectionState.CAN_READ:
            self._pass_reset_on(flow)
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

        mitmproxy calls neither when it fails itself.
        """
        for exchange in list(self._exchanges.values()):
            if exchange.flow.client_conn.id == client.id:
                self._end_hung_up(
                    exchange.call, "the client's connection ended before the exchange did"
                )
                self._release(exchange.flow)
        self._captured.discard(client.id)
        self._router.forget(client.id)

    def websocket_message(self, flow: http.HTTPFlow) -> None:
        if flow.websocket is not None:
            flow.websocket.messages.clear()  # mitmproxy would keep them all.

    def websocket_end(self, flow: http.HTTPFlow) -> None:
        self._sockets.pop(flow.id, None)
        self._metrics.in_flight.set(self.in_flight)

    def stop(self) -> None:
        """Record what is still going on as cut off by the sidecar's end."""
        for exchange in self._exchanges.values():
            self._end(exchange.call, "sidecar_stopped")
        self._exchanges.clear()

    async def finish_pulls(self) -> None:
        """Wait for the tokens of cancelled calls; every fetch is bounded."""
        while self._pulls:
            await asyncio.wait(self._pulls)

    def _begin(self, flow: http.HTTPFlow) -> None:
        way = way_of(flow)
        proxy_authorization = self._router.proxy_authorization(flow) if way == "proxy" else None
        plan = self._router.plan(flow)
        if plan is None:
            self._captured.discard(flow.client_conn.id)
            # Else another name of the model server would open it without a key.
            if way == "proxy":
                passing = self.access.connect(proxy_authorization)
                if isinstance(passing, Refusal):
                    self._refuse(flow, passing)
            return
        mistaken = routes.mistaken_run(plan.target) if plan.to_routes else None
        if mistaken is not None:
            # It would go upstream with its prefix, and be found nowhere.
            self._refuse(flow, Refusal(400, not_a_run(mistaken)))
            return
        request = flow.request
        method = request.data.method.decode("latin-1")
        # The real host may mean something else by a path; only ours are put right.
        route = routes.route(method, plan.target)
        asked = _fields(request.headers)
        admission = self.access.admit(
            method, plan.target, asked, plan.path_run, plan.proxy_authorization
        )
        if isinstance(admission, Refusal):
            self._refuse(flow, admission)
            return
        for name in admission.spent:
            del request.headers[name]
        if admission.run is not None and admission.run != plan.run:
            plan = replace(plan, run=admission.run)
        headers, session = _take_out(request.headers, asked)
        host, port, *_ = flow.client_conn.peername or ("", 0)
        call = Call(
            route=route,
            session=Session(admission.run, session, f"{host}:{port}", plan.way),
            method=method,
            headers=headers,
            started=request.timestamp_start,
        )
        call.path = plan.target
        exchange = _Exchange(call, flow, plan)
        self._exchanges[flow.id] = exchange
        self._captured.add(flow.client_conn.id)
        self._metrics.in_flight.set(self.in_flight)
        if route != "other" and plan.to_routes:
            # Compressed replies could not be cut.
            request.headers["accept-encoding"] = "identity"
        if plan.reads_model:
            request.stream = False
            return
        if route != "other":
            request.stream = self._request_stream(call)
        self._send(exchange)

    def _refuse(self, flow: http.HTTPFlow, refusal: Refusal) -> None:
        """Answer in place of the upstream. A refused request is not recorded."""
        flow.request.stream = False
        discard_body(flow.request)
        content = b"" if flow.request.method == "HEAD" else refusal.body
        flow.response = http.Response.make(refusal.status, content, refusal.headers)
        self._metrics.refused(refusal.status)

    def _send_body(self, exchange: _Exchange) -> None:
        """Send a request on whose body was waited for."""
        content = exchange.flow.request.data.content or b""
        exchange.call.request_chunk(content)
        self._send(exchange, content)

    def _send(self, exchange: _Exchange, content: bytes | None = None) -> None:
        """Choose a request's upstream; ``content`` is its body where that was waited for."""
        call, flow = exchange.call, exchange.flow
        exchange.sent = self._router.send(flow, exchange.plan, content)
        self._went(flow, exchange.sent)
        source = self._sources.of(call.upstream, call.route) if exchange.sent.tap else "none"
        if source == "tap":
            call.nonce = new_nonce()
            flow.request.headers[wire.HEADER] = call.nonce
        elif source == "api" and content is not None:
            self._ask_in_text(exchange)
        elif source == "api":
            flow.request.stream, exchange.to_splice = False, True

    def _ask_in_text(self, exchange: _Exchange) -> None:
        """Ask for tokens in a request's body, which is here."""
        request = exchange.flow.request
        encoding = request.headers.get("content-encoding", "")
        try:
            text = coding.decode(request.data.content or b"", encoding)
        except ValueError:
            return
        asking = exchange.call.ask_in_text(text)
        if asking is not None:
            set_body(request, asking)

    def _cut_whole(self, call: Call, flow: http.HTTPFlow) -> None:
        """Take the tokens out of a reply that is here as a whole."""
        assert flow.response is not None
        response = flow.response
        try:
            passed = call.reply_chunk(response.data.content or b"")
            call.end_reply()
            response.data.content, call.rest = passed + call.rest, b""
            if "content-length" in response.headers:
                response.headers["content-length"] = str(len(response.data.content))
        except Exception as error:
            call.fault = f"the sidecar failed to capture the reply: {error!r}"
            self._fault("a reply goes on as it comes from upstream")

    def _went(self, flow: http.HTTPFlow, sent: Sent) -> None:
        """Note in a call where it went."""
        call = self._exchanges[flow.id].call
        call.upstream, call.path, call.renamed = sent.upstream, sent.path, sent.renamed
        call.authorization = flow.request.headers.get("authorization")

    def _waiting(self, client: str) -> tuple[http.HTTPFlow | None, Sent | None]:
        """Return the exchange of a client connection that no reply has come to."""
        for exchange in self._exchanges.values():
            if exchange.flow.client_conn.id == client and exchange.call.status is None:
                return exchange.flow, exchange.sent
        return None, None

    def _lacks_websocket(self, exchange: _Exchange) -> bool:
        """Say whether the upstream has just refused a WebSocket because it knows none there."""
        request, response = exchange.flow.request, exchange.flow.response
        return (
            response is not None
            and response.status_code in _NO_WEBSOCKET
            and routes.is_responses_upgrade(
                request.method, exchange.plan.target, request.headers.get("upgrade")
            )
        )

    def _request_stream(self, call: Call) -> Callable[[bytes], Piece]:
        def stream(data: bytes) -> Piece:
            try:
                call.request_chunk(data)
            except Exception:
                self._fault("a request is captured in part")
            return data or []

        return stream

    def _reply_stream(self, exchange: _Exchange) -> Callable[[bytes], Piece]:
        call = exchange.call

        def stream(data: bytes) -> Piece:
            if call.fault is not None:
                return data or []
            held = call.held
            try:
                if data:
                    passed = call.reply_chunk(data)
                    if call.holds_end and exchange.letting_go is None:
                        exchange.letting_go = asyncio.get_running_loop().call_later(
                            _COMMIT_SECONDS, self._let_go, exchange
                        )
                    return passed or []
                call.end_reply()
            except Exception as error:
                call.fault = f"the sidecar failed to capture the reply: {error!r}"
                self._fault("a reply goes on as it comes from upstream")
                return held + data or []
            return []

        return stream

    def _let_go(self, exchange: _Exchange) -> None:
        """Send a stream's last event on, though its reply has not ended."""
        end = exchange.call.let_end_go()
        if end:
            self._write(exchange.flow, end)

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
            call.pulled = await self._puller.pull(call.upstream, call.nonce, call.authorization)
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
            record = call.record(outcome, ended, error)
            self._sink.put(record, done)
        except Exception as failure:
            self._fault("a record is lost")
            # The message of an encoding error quotes what it could not encode.
            self._sink.lose(f"a record could not be made: {type(failure).__name__}")
            if done is not None:
                done()
            return
        self._metrics.ended(call, outcome, ended - record.started)
        if outcome == "complete" and call.asks_tokens and call.status == 200:
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
            self._committed.append(lambda: release(False))
            if not self._waking:
                self._waking = True
                with contextlib.suppress(RuntimeError):  # The loop may have ended.
                    loop.call_soon_threadsafe(self._release_committed)

        limit = 0 if self._commit_overdue else _COMMIT_SECONDS
        timer = loop.call_later(limit, release, True)
        return done

    def _release_committed(self) -> None:
        """Let the replies go on whose records have come to the shard."""
        self._waking = False  # First: what is added from now on may not be seen below.
        while self._committed:
            self._committed.popleft()()

    def _added(self, phase: Phase, call: Call, since: float) -> None:
        if call.route != "other":
            self._metrics.added(phase, time.perf_counter() - since)

    def _release(self, flow: http.HTTPFlow) -> None:
        exchange = self._exchanges.pop(flow.id, None)
        if exchange is not None and exchange.letting_go is not None:
            exchange.letting_go.cancel()
        self._metrics.in_flight.set(self.in_flight)

    def _call(self, flow: http.HTTPFlow) -> Call | None:
        known = self._exchanges.get(flow.id)
        return known.call if known else None

    def _fault(self, what: str) -> None:
        self._metrics.faults.inc()
        _log.exception("capturing failed, the traffic goes on: %s", what)


def _take_out(headers: http.Headers, asked: Headers) -> tuple[Headers, str | None]:
    """Take out of a head what would make the reply another one.

    ``asked``: its fields. Returns those that are recorded, and the session that they name.
    """
    recorded, sessions = asked, []
    for name, value in asked:
        lower = name.lower()
        if lower == SESSION_HEADER:
            sessions.append(value)
        elif lower == "upgrade":
            _stay_with_http1(headers)
        elif lower == wire.HEADER:
            recorded = [field for field in asked if field[0].lower() != wire.HEADER]
            headers.pop(wire.HEADER, None)
    return recorded, ", ".join(sessions) or None


def _stay_with_http1(headers: http.Headers) -> None:
    """Take out the offer to go on in HTTP/2 (RFC 7540, 3.2), as Java's client makes it.

    It is hop-by-hop. A server that accepted it would answer this call and all later ones unread.
    """
    if headers.get("upgrade", "").lower() != "h2c":
        return
    options = (option.strip() for option in headers.get("connection", "").split(","))
    kept = [option for option in options if option.lower() not in ("upgrade", "http2-settings")]
    for name in ("upgrade", "http2-settings", "connection"):
        headers.pop(name, None)
    if any(kept):
        headers["connection"] = ", ".join(filter(None, kept))


def _answer_upgrade_required(response: http.Response) -> None:
    """Make a reply one that says: no WebSocket here.

    Codex then goes on in the same turn with POST; after any other status it would try again.
    """
    response.status_code, response.reason = 426, "Upgrade Required"
    response.headers.fields = ((b"connection", b"close"), (b"content-length", b"0"))
    response.stream = lambda _: []


def _ends_with_connection(flow: http.HTTPFlow) -> bool:
    """Say whether only the end of its connection tells where a reply ends (RFC 9112, 6.3)."""
    try:
        return http1.expected_http_body_size(flow.request, flow.response) == -1
    except ValueError:
        return False


def _fields(headers: http.Headers) -> Headers:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.fields]
