"""Which model server a request goes to, under which model name and with whose credentials. Pure."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from deploy.errors import UserError
from sidecar.config import Credentials, SidecarConfig, UpstreamConfig
from sidecar.routing.addresses import Address, Upstream, parse_upstream

_KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})

Headers = list[tuple[str, str]]


@dataclass(frozen=True)
class Target:
    """An upstream: one model server, or replicas that serve the same."""

    name: str
    replicas: tuple[Upstream, ...]
    paths: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    rename: Mapping[str, str] | None = None
    credentials: Credentials = "forward"
    credential: tuple[str, str] | None = None
    """Header name and value in place of the agent's credentials."""
    tap: bool = True
    """Its servers may have the token tap."""
    health_path: str = "/health"

    def takes_path(self, path: str) -> bool:
        """Say whether requests to ``path`` (without query) may go here."""
        return not self.paths or _any_match(path, self.paths)

    def takes_model(self, model: str | None) -> bool:
        """Say whether requests for ``model`` may go here."""
        return not self.models or (model is not None and _any_match(model, self.models))

    def renamed(self, model: str) -> str | None:
        """Return the name to ask for instead of ``model``, None if that stays."""
        names = self.rename or {}
        new = names.get(model) or next(
            (new for pattern, new in names.items() if fnmatchcase(model, pattern)), None
        )
        return None if new == model else new

    def with_credentials(self, headers: Headers) -> Headers:
        """Return the request's headers with the credentials that this upstream gets."""
        if self.credentials == "forward":
            return headers
        kept = [(name, value) for name, value in headers if name.lower() not in _KEY_HEADERS]
        return kept + ([self.credential] if self.credential else [])


class Targets:
    """All upstreams, in the order in which they are asked whether a request is theirs."""

    def __init__(self, targets: Sequence[Target]) -> None:
        """One of ``targets`` takes every request."""
        self.all = tuple(targets)
        self.default = next(t for t in targets if not t.paths and not t.models)
        """The one that takes every request that comes to it."""

    def reads_model(self, path: str) -> bool:
        """Say whether what becomes of a request to ``path`` depends on the model it asks for."""
        for target in self.all:
            if target.takes_path(path):
                return bool(target.models or target.rename)
        return False

    def choose(self, path: str, model: str | None) -> Target:
        """Return the upstream of a request; ``model`` is None where it names none."""
        for target in self.all:
            if target.takes_path(path) and target.takes_model(model):
                return target
        return self.default

    def addresses(self) -> set[Address]:
        """Return where all model servers listen."""
        return {replica.address for replica in self.replicas()}

    def replicas(self) -> list[Upstream]:
        """Return all model servers."""
        return [replica for target in self.all for replica in target.replicas]


class Health:
    """Which replicas are well, as far as is known. A replica is well until something fails."""

    def __init__(self) -> None:
        self._unreachable: set[str] = set()
        self._failing: set[str] = set()

    def connected(self, replica: Upstream, done: bool) -> bool:
        """Note whether a replica took a connection; say whether its state has changed."""
        return self._note(replica, self._unreachable, done)

    def checked(self, replica: Upstream, well: bool) -> bool:
        """Note a health check's outcome; say whether the replica's state has changed."""
        before = self.well(replica)
        if well:
            self._unreachable.discard(replica.url)
        self._note(replica, self._failing, well)
        return self.well(replica) != before

    def well(self, replica: Upstream) -> bool:
        """Say whether nothing is known against a replica."""
        return replica.url not in self._unreachable and replica.url not in self._failing

    def _note(self, replica: Upstream, against: set[str], well: bool) -> bool:
        before = self.well(replica)
        (against.discard if well else against.add)(replica.url)
        return self.well(replica) != before

    def order(self, target: Target, key: str) -> list[Upstream]:
        """Return the replicas in the order in which a caller should try them.

        The order is the same for the same ``key``, and for other keys another (rendezvous hashing,
        Thaler and Ravishankar 1998): a caller keeps finding its prefix cache, and when a replica
        goes only its own callers move. Replicas that are ill come last.
        """

        def weight(replica: Upstream) -> bytes:
            return hashlib.blake2b(f"{key}\0{replica.url}".encode(), digest_size=8).digest()

        ranked = sorted(target.replicas, key=weight)
        return sorted(ranked, key=lambda replica: not self.well(replica))


def parse_targets(
    config: SidecarConfig, environment: Mapping[str, str], read: Callable[[str], str]
) -> Targets:
    """Return the upstreams of a configuration; ``read`` returns the text of a file.

    Raises:
        UserError: an address, a credential or a path pattern can't be right.
    """
    targets = [_target(entry, environment, read) for entry in config.upstreams]
    names = [target.name for target in targets]
    for one, other in itertools.combinations(names, 2):
        if one == other:
            raise UserError(f"sidecar.upstreams: two are named {one}: give each its own name")
    if all(target.paths or target.models for target in targets):
        targets.append(Target("default", (parse_upstream(config.upstream),)))
    return Targets(targets)


def _target(
    entry: UpstreamConfig, environment: Mapping[str, str], read: Callable[[str], str]
) -> Target:
    replicas = tuple(parse_upstream(url, "sidecar.upstreams") for url in entry.urls)
    name = entry.name or replicas[0].url
    if len({replica.scheme for replica in replicas}) > 1:
        raise UserError(f"sidecar.upstreams {name}: replicas are all http or all https")
    for pattern in entry.paths:
        if not pattern.startswith(("/", "*")):
            raise UserError(f"sidecar.upstreams {name}: path {pattern!r} must begin with a slash")
    return Target(
        name,
        replicas,
        tuple(entry.paths),
        tuple(entry.models),
        dict(entry.rename),
        entry.credentials,
        _credential(entry, name, environment, read),
        entry.tap,
        entry.health_path,
    )


def _credential(
    entry: UpstreamConfig,
    name: str,
    environment: Mapping[str, str],
    read: Callable[[str], str],
) -> tuple[str, str] | None:
    if entry.credentials != "replace":
        if entry.credential_env or entry.credential_file:
            raise UserError(
                f'sidecar.upstreams {name}: a credential is only used with credentials = "replace"'
            )
        return None
    if bool(entry.credential_env) == bool(entry.credential_file):
        raise UserError(
            f"sidecar.upstreams {name}: give the API key in either credential_env or "
            "credential_file"
        )
    if entry.credential_env:
        key = environment.get(entry.credential_env, "").strip()
        where = f"environment variable {entry.credential_env}"
    else:
        where = f"file {entry.credential_file}"
        try:
            key = read(entry.credential_file).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"sidecar.upstreams {name}: {where} can't be read: {error}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(f"sidecar.upstreams {name}: the {where} holds no API key")
    value = f"Bearer {key}" if entry.credential_header == "authorization" else key
    return entry.credential_header, value


def _any_match(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
