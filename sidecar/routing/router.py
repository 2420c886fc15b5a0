"""Decides where a request goes, and makes mitmproxy send it there.

``plan`` looks at a request's head alone; ``send`` comes when the model is known, which for most
configurations is right then.
"""

from dataclasses import dataclass

from mitmproxy import http
from mitmproxy.net.http import url

from sidecar.access.admission import run_of
from sidecar.bodies import body
from sidecar.routing import routes
from sidecar.routing.addresses import Upstream
from sidecar.routing.intercept import Interception
from sidecar.routing.upstreams import Headers, Health, Target, Targets
from sidecar.routing.ways import ProxyCredentials, names_of, way_of
from sidecar.traces.record import Way

# What harnesses send to name a session: calls of one should find their prefix cache.
_SESSION_HEADERS = (
    "x-ridealong-session",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-session-affinity",
    "x-affinity",
)


@dataclass(frozen=True)
class Plan:
    """What is known of a request before its body is."""

    way: Way
    run: str | None
    path_run: str | None
    """The run of the ``/r/<run>`` prefix."""
    proxy_authorization: str | None
    """The credentials of the proxy connection it came by."""
    target: str
    """Path and query, without the run's prefix."""
    to_routes: bool
    """An upstream of ours gets it, not the host it is addressed to."""
    path: str
    """The path by which it is routed: without query, with one ``/v1``."""
    reads_model: bool
    """Its upstream, or the name of its model there, depends on its body."""


@dataclass
class Sent:
    """Where a request went."""

    upstream: str
    """URL of the model server."""
    path: str
    """Path and query there."""
    replicas: list[Upstream]
    """Servers that may get it, the one it is meant for first; empty: only the one it went to."""
    target: str
    """Path and query without any upstream's prefix."""
    tap: bool
    """The model server may have the token tap."""
    renamed: tuple[str, str] | None = None


class Router:
    """Routes requests by the configuration's upstreams and intercepted hosts."""

    def __init__(self, targets: Targets, interception: Interception, health: Health) -> None:
        self.targets = targets
        self._interception = interception
        self._health = health
        self._credentials = ProxyCredentials()

    def connect(self, flow: http.HTTPFlow) -> None:
        """Take note of a CONNECT request, which opens a tunnel through the proxy."""
        self._credentials.connect(flow)

    def proxy_authorization(self, flow: http.HTTPFlow) -> str | None:
        """Return the credentials of the proxy connection a request came by; before ``plan``."""
        return self._credentials.of(flow)

    def forget(self, client: str) -> None:
        """Let go of a client connection that has ended."""
        self._credentials.forget(client)

    def plan(self, flow: http.HTTPFlow) -> Plan | None:
        """Say what is to become of a request; None: it passes unrecorded.

        Takes what is meant for a proxy alone out of its head.
        """
        way = way_of(flow)
        authorization = self._credentials.take(flow)
        to_routes = True
        if way != "base_url":
            destination = self._interception.destination(names_of(flow))
            if destination is None:
                return None
            to_routes = destination == "routes"
        request = flow.request
        path_run, target = None, request.data.path.decode("latin-1")
        if to_routes:
            path_run, target = routes.split_run(target)
        path = _path(routes.upstream_target("", target))
        return Plan(
            way,
            path_run or run_of(authorization),
            path_run,
            authorization,
            target,
            to_routes,
            path,
            to_routes and _has_body(request) and self.targets.reads_model(path),
        )

    def send(self, flow: http.HTTPFlow, plan: Plan, content: bytes | None = None) -> Sent:
        """Address a request to its upstream; ``content`` is its body where the plan asks for it.

        The body that goes upstream is then the request's ``data.content``.
        """
        request = flow.request
        if not plan.to_routes:
            origin = url.unparse(request.scheme, request.host, request.port, "")
            return Sent(origin, plan.target, [], plan.target, tap=False)
        read = body.read(content, request.headers.get("content-encoding", "")) if content else None
        target = self.targets.choose(plan.path, read.model if read else None)
        replicas = list(target.replicas)
        if len(replicas) > 1:
            replicas = self._health.order(target, plan.run or _caller(flow))
        sent = Sent("", "", replicas, plan.target, target.tap)
        address(flow, sent, replicas[0])
        _give_credentials(request, target)
        if content is not None:
            sent.renamed = _rename(request, target, read, content)
        return sent


def address(flow: http.HTTPFlow, sent: Sent, upstream: Upstream) -> None:
    """Address a request to one model server, before anything of it was sent."""
    request = flow.request
    request.data.scheme = upstream.scheme.encode()
    request.data.host, request.data.port = upstream.address.host, upstream.address.port
    # Without this the request line would name the host that the agent addressed.
    request.data.authority = b""
    request.host_header = url.hostport(
        upstream.scheme, upstream.address.host, upstream.address.port
    )
    path = routes.upstream_target(upstream.prefix, sent.target)
    request.data.path = path.encode("latin-1")
    sent.upstream, sent.path = upstream.url, path


def _give_credentials(request: http.Request, target: Target) -> None:
    if target.credentials == "forward":
        return
    fields: Headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.fields
    ]
    request.headers.fields = tuple(
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in target.with_credentials(fields)
    )


def _rename(
    request: http.Request, target: Target, read: body.Read | None, content: bytes
) -> tuple[str, str] | None:
    """Set the body that goes upstream; return the model's name before and after if that changed."""
    request.data.content = content
    if read is None or read.model is None:
        return None
    new = target.renamed(read.model)
    if new is None:
        return None
    set_body(request, body.with_model(read, new))
    return read.model, new


def set_body(request: http.Request, text: bytes) -> None:
    """Replace a request's body by another, which is not compressed."""
    request.data.content = text
    request.headers.pop("content-encoding", None)
    if "content-length" in request.headers:
        request.headers["content-length"] = str(len(text))


def _caller(flow: http.HTTPFlow) -> str:
    """Return what calls with the same prefix have in common, where no run is named."""
    headers = flow.request.headers
    session = next((v for name in _SESSION_HEADERS if (v := headers.get(name))), None)
    host: str = (flow.client_conn.peername or ("",))[0]
    return session or host


def _has_body(request: http.Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get(
        "content-length", "0"
    ).strip() not in ("", "0")


def _path(target: str) -> str:
    return target.partition("?")[0]
