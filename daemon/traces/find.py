"""Finds records in folders of shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon import runs
from deploy.errors import UserError
from sidecar.traces.reader import Located, RecordReader
from sidecar.traces.record import Exchange
from sidecar.traces.shards import SUFFIX, read_frames


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
        UserError: a path is missing or no shard, or a folder holds none.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            here = sorted(path.glob(f"*{SUFFIX}"))
            if not here:
                raise UserError(f"{path} holds no trace shards (*{SUFFIX})")
            found += here
        elif not path.exists():
            raise UserError(f"{path} does not exist: name a folder with trace shards, or a shard")
        elif not _is_shard(path):
            raise UserError(
                f"{path} is no trace shard: name a folder with trace shards, or a shard"
            )
        else:
            found.append(path)
    return found


def _is_shard(path: Path) -> bool:
    """Say whether a file is a shard, by its name, which a damaged one keeps, or its beginning."""
    if path.name.endswith(SUFFIX):
        return True
    try:
        frame = next(read_frames(path), None)
    except OSError as error:
        raise _unreadable(path, error) from None
    return frame is not None and frame.error is None


def _unreadable(shard: Path, error: OSError) -> UserError:
    return UserError(f"{shard} can't be read: {error.strerror or error}")


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
            raise _unreadable(shard, error) from None


def damage(shard: Path, located: Located) -> str:
    """Say where a shard is damaged, and how."""
    return f"{shard.name} at {located.frame}: {located.error}"


def exchanges(
    paths: Sequence[Path], query: Query, warn: Callable[[str], None]
) -> Iterator[Exchange]:
    """Yield the exchanges that are meant, in the order in which they were written.

    Damaged records are passed over; ``warn`` is told of each place once.

    Raises:
        UserError: as ``records``.
    """
    warned: set[tuple[Path, int]] = set()
    for shard, located in records(paths):
        if located.record is None and (shard, located.frame) not in warned:
            warned.add((shard, located.frame))
            warn(f"damaged: {damage(shard, located)}")
        if isinstance(located.record, Exchange) and query.takes(located.record):
            yield located.record
