"""Who may post which run's calls. Pure: decides from headers, before anything goes upstream.

A run key is taken wherever a harness puts its API key: as Bearer token, Basic password, in
``x-api-key`` and its relatives, or as the password of proxy credentials. It opens the model calls
of its run and what harnesses ask beside them, and nothing else of the model server.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from sidecar.access.keys import BadKey, RunKeys, is_run
from sidecar.access.refusal import Refusal

_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
# Beside model calls: liveness, the list of models, counting tokens, stored responses.
_OPEN_EXACTLY = frozenset({"/", "/health", "/ping", "/version", "/models"})
_OPEN_BELOW = ("/chat/completions", "/completions", "/responses", "/messages", "/models/")

_WRONG_KEY = "the run key is not valid here: get a new one with `ridealong key RUN`"
_NO_KEY = (
    "this sidecar needs a run key: print one with `ridealong key RUN` and give it to the agent "
    "as its API key"
)


@dataclass(frozen=True)
class Admission:
    """A request that may go on."""

    run: str | None
    """The run it belongs to, None if nothing names one."""
    keyed: bool = False
    """A run key proved it."""
    spent: frozenset[str] = frozenset()
    """Lower-case names of the headers that held the key: they must not go upstream."""


class Access:
    """Admits requests under one set of keys."""

    def __init__(self, keys: RunKeys, required: bool) -> None:
        """``required``: nothing is admitted without a run key."""
        self.required = required
        self._keys = keys

    def admit(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        path_run: str | None,
        proxy_authorization: str | None = None,
    ) -> Admission | Refusal:
        """Decide on a request to the model server.

        ``path`` is its target without the run's prefix, ``path_run`` the run in that prefix,
        ``proxy_authorization`` the credentials of the proxy connection it came by. The run is the
        path's; else the key's, which must be the same; else the proxy's user name.
        """
        try:
            runs, spent = self._presented(headers)
            proxy = self._proxy(proxy_authorization)
        except BadKey:
            return _unauthorized(_WRONG_KEY)
        if proxy.keyed and proxy.run is not None:
            runs.add(proxy.run)
        if not runs:
            if self.required:
                return _unauthorized(_NO_KEY)
            return Admission(path_run or proxy.run)
        run, *others = runs
        if others or path_run not in (None, run):
            shown = " and ".join(sorted(runs))
            return _forbidden(
                f"the run key is for run {shown}, the request for run {path_run or others[0]}: "
                "give each run its own key"
            )
        if not in_scope(path):
            return _forbidden(f"a run key does not open {method} {path.partition('?')[0]}")
        return Admission(run, True, frozenset(spent))

    def connect(self, proxy_authorization: str | None) -> Admission | Refusal:
        """Decide on what is asked of the proxy: CONNECT, or a host that is not read."""
        try:
            proxy = self._proxy(proxy_authorization)
        except BadKey:
            return _proxy_unauthorized(_WRONG_KEY)
        if self.required and not proxy.keyed:
            return _proxy_unauthorized(_NO_KEY)
        return proxy

    def _presented(self, headers: Iterable[tuple[str, str]]) -> tuple[set[str], set[str]]:
        runs, spent = set(), set()
        for name, value in headers:
            lower = name.lower()
            if lower not in _KEY_HEADERS:
                continue
            for text in _credentials(value):
                run = self._keys.verify(text)
                if run is not None:
                    runs.add(run)
                    spent.add(lower)
        return runs, spent

    def _proxy(self, authorization: str | None) -> Admission:
        """Return who the proxy credentials are: a key's run, else the user name as it is given."""
        if not authorization:
            return Admission(None)
        user = run_of(authorization)
        for text in _credentials(authorization):
            run = self._keys.verify(text)
            if run is not None:
                if user not in (None, run, text):
                    raise BadKey("the user name is another run")
                return Admission(run, True)
        return Admission(user)


def in_scope(path: str) -> bool:
    """Say whether a run key opens a request target, whatever the method."""
    text = unquote(path.partition("?")[0])
    if any(part in (".", "..") for part in text.split("/")) or "//" in text or "\\" in text:
        return False
    while text.startswith("/v1/"):
        text = text[3:]
    if text in _OPEN_EXACTLY:
        return True
    return any(text == base or text.startswith(base.rstrip("/") + "/") for base in _OPEN_BELOW)


def _credentials(value: str) -> list[str]:
    """Return the texts in a header value that may be a run key."""
    scheme, _, rest = value.strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "basic" and rest:
        return list(_basic(rest))
    return [rest if scheme.lower() == "bearer" and rest else value.strip()]


def run_of(authorization: str | None) -> str | None:
    """Return the run that proxy credentials name: the user name of Basic ones (RFC 7617).

    None if that can't be a run id.
    """
    scheme, _, rest = (authorization or "").strip().partition(" ")
    user = _basic(rest.strip())[0] if scheme.lower() == "basic" else ""
    return user if is_run(user) else None


def _basic(encoded: str) -> tuple[str, str]:
    """Return user name and password (RFC 7617); two empty texts if they can't be decoded."""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return "", ""
    return user, password


def _unauthorized(message: str) -> Refusal:
    challenge = {"www-authenticate": 'Bearer realm="ridealong"'}
    return Refusal(401, message, "authentication_error", challenge)


def _proxy_unauthorized(message: str) -> Refusal:
    challenge = {"proxy-authenticate": 'Basic realm="ridealong"'}
    return Refusal(407, message, "authentication_error", challenge)


def _forbidden(message: str) -> Refusal:
    return Refusal(403, message, "permission_error")
