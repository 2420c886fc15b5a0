"""Finds records in folders of shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon import runs
from deploy.errors import UserError
from sidecar.traces.reader import Located, RecordReader
from sidecar.traces.record import Exchange
from sidecar.traces.shards import SUFFIX


@dataclass(frozen=True)
class Query:
    """Which calls are meant; None means any. ``call``: an id or how one begins."""

    call: str | None = None
    run: str | None = None
    route: str | None = None
    outcome: str | None = None

    def takes(self, exchange: Exchange) -> bool:
        """Say whether an exchange is meant."""
        return (
            (self.call is None or exchange.id.startswith(self.call))
            and (self.run is None or runs.run_key(exchange).name == self.run)
            and (self.route is None or exchange.route == self.route)
            and (self.outcome is None or exchange.outcome == self.outcome)
        )


def shards(paths: Sequence[Path]) -> list[Path]:
    """Return the shards of folders, oldest first, and the files that are named themselves.

    Raises:
        UserError: a path is missing, or a folder holds no shard.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            here = sorted(path.glob(f"*{SUFFIX}"))
            if not here:
                raise UserError(f"{path} holds no trace shards (*{SUFFIX})")
            found += here
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"{path} does not exist: name a folder with trace shards, or a shard")
    return found


def records(paths: Sequence[Path]) -> Iterator[tuple[Path, Located]]:
    """Yield every record of the shards, whole; what is damaged comes as an error in its place.

    Raises:
        UserError: as ``shards``, or a file can't be read.
    """
    for shard in shards(paths):
        try:
            for _, located in RecordReader(shard).frames():
                for one in located:
                    yield shard, one
        except OSError as error:
            raise UserError(f"{shard} can't be read: {error.strerror or error}") from None


def exchanges(paths: Sequence[Path], query: Query) -> Iterator[Exchange]:
    """Yield the exchanges that are meant, in the order in which they were written.

    Damaged records are passed over: ``stats`` counts them.

    Raises:
        UserError: as ``records``.
    """
    for _, located in records(paths):
        if isinstance(located.record, Exchange) and query.takes(located.record):
            yield located.record
