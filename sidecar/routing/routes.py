"""Which request is a model call, whose run it belongs to, and how its reply ends. Pure."""

import re
from urllib.parse import unquote

from sidecar.traces.record import Route

_RUN_PREFIX = re.compile(r"/r/([A-Za-z0-9][A-Za-z0-9._-]{0,127})(?=[/?]|$)")
_ANY_PREFIX = re.compile(r"/r/([^/?]+)(/[^?]*)")
_CALLS: dict[str, Route] = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
_BESIDE_CALLS = re.compile(r"/models|/models/.+|/messages/count_tokens|/responses/.+")
_VERSION = re.compile(r"/v[0-9]+[a-z0-9]*$")
# How the last event of a stream begins, by the specifications of OpenAI's and Anthropic's APIs.
_LAST_EVENT: dict[Route, tuple[bytes, ...]] = {
    "chat": (b"data: [DONE]",),
    "completions": (b"data: [DONE]",),
    "responses": (
        b"event: response.completed",
        b"event: response.incomplete",
        b"event: response.failed",
    ),
    "messages": (b"event: message_stop",),
}


def split_run(target: str) -> tuple[str | None, str]:
    """Split ``/r/<run>/rest?query`` into run id and ``/rest?query``.

    A run id has 1 to 128 letters, digits, dots, hyphens and underscores and starts with a letter or
    digit. Any other request target is returned as it is, with no run.
    """
    match = _RUN_PREFIX.match(target)
    if match is None:
        return None, target
    rest = target[match.end() :]
    return match[1], rest if rest.startswith("/") else f"/{rest}"


def mistaken_run(target: str) -> str | None:
    """Return what stands before a model call in the place of a run id and is none."""
    match = _ANY_PREFIX.match(target)
    if match is None or split_run(target)[0] is not None or route("POST", match[2]) == "other":
        return None
    return unquote(match[1])


def route(method: str, target: str) -> Route:
    """Say which kind of model call a request is; ``other`` if none.

    A missing or doubled ``/v1``, the usual slips in a base URL, makes no difference.
    """
    if method != "POST":
        return "other"
    path = target.partition("?")[0]
    while path.startswith("/v1/"):
        path = path[3:]
    return _CALLS.get(path, "other")


def upstream_target(prefix: str, target: str) -> str:
    """Return the request target that goes upstream, where ``prefix`` is the upstream's path prefix.

    OpenAI's SDKs want a base URL with ``/v1``, Anthropic's one without, and whether the upstream's
    own URL has it is a matter of taste: model calls and what belongs to them get exactly one. Other
    targets only get the prefix.
    """
    if not target.startswith("/"):
        return target
    rest = target
    while rest.startswith("/v1/"):
        rest = rest[3:]
    path = rest.partition("?")[0]
    if path not in _CALLS and not _BESIDE_CALLS.fullmatch(path):
        return prefix + target
    return f"{prefix}{rest}" if _VERSION.search(prefix) else f"{prefix}/v1{rest}"


def is_responses_upgrade(method: str, target: str, upgrade: str | None) -> bool:
    """Say whether a request asks to speak the Responses protocol over a WebSocket."""
    return (
        method == "GET"
        and (upgrade or "").lower() == "websocket"
        and route("POST", target) == "responses"
    )


def last_event(call: Route, text: bytes, at_line_start: bool = True) -> int:
    """Return where in ``text`` a line starts that begins the stream's last event, -1 if none does.

    ``at_line_start``: ``text`` itself begins at the start of a line.
    """
    for start in _LAST_EVENT.get(call, ()):
        if start not in text:
            continue
        if at_line_start and text.startswith(start):
            return 0
        newline = text.find(b"\n" + start)
        if newline >= 0:
            return newline + 1
    return -1
