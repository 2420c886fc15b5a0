"""Repeated history stored once: a record's texts as differences from an earlier record's. No I/O.

An agent sends its whole conversation with every call. What a request's body and the tap's prompt
line share with those of an earlier call (the record's *base*, in the same shard) is left out of the
shard: such a text is stored as pieces, each either written out or a range of the base's text. The
pieces are cut between characters, so a shard is still lines of readable JSON. The CRC-32 of the
whole text tells when a damaged or missing base gives something else than what was recorded.

In memory a record is always whole: ``History.encode`` on the way to the disk, ``expand`` on the way
back.
"""

import zlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from sidecar.traces.record import Body, Delta, Exchange, Part, Record, Repeats, encode

_MIN_TEXT = 512
"""Shorter texts are not worth a reference."""
_MIN_RUN = 64
"""Shared bytes below which a range costs about as much as it saves."""
_MAX_RUNS = 32
_MAX_SEARCHES = 64
_MAX_SEARCHED = 32 << 20
"""Bytes looked through for one record at most, so that storing it keeps up with the traffic."""
_BLOCK = 1 << 15
_CANDIDATES = 16
_LONG_CHAIN = 100
_ASIDE = 256
"""What a record may lack of its base to count as the base's continuation, in bytes."""
_MAX_TEXT_BYTES = 2**30

_Run = tuple[int, int, int]
"""What two texts share: start in the base, start in the text, length."""

Place = tuple[int, int]
"""Where a record lies in its shard: offset of its frame, number of its line in it."""


class Unresolved(ValueError):
    """A record can't be made whole; the message says why."""


@dataclass(frozen=True)
class Texts:
    """The texts of a record that may repeat, in UTF-8."""

    body: bytes
    """The request's body; empty when it is short or no text."""
    tap: tuple[tuple[int, bytes], ...]
    """The long tap lines, with their index in the tap."""

    @classmethod
    def of(
        cls,
        exchange: Exchange,
        body: bytes | None = None,
        lines: Mapping[int, bytes] = MappingProxyType({}),
    ) -> "Texts":
        """Take the texts of a whole record; ``body`` and ``lines`` are those already encoded.

        Raises:
            UnicodeEncodeError: the record can't be written in any form.
        """
        if body is None:
            text = exchange.request.body.text if exchange.request.body is not None else None
            body = text.encode() if text is not None and len(text) >= _MIN_TEXT else b""
        tap = (
            (index, lines[index] if index in lines else line.encode())
            for index, line in enumerate(exchange.tap)
            if len(line) >= _MIN_TEXT
        )
        return cls(body, tuple(tap))

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(line) for _, line in self.tap)


class _Search:
    """Looks for pieces of one record in texts of others, until it has looked through so much."""

    def __init__(self) -> None:
        self._left = _MAX_SEARCHED

    def find(self, base: bytes, piece: bytes, start: int, end: int) -> int:
        """As ``bytes.find``; -1 as well where the bytes left do not reach."""
        if end - start > self._left:
            return -1
        found = base.find(piece, start, end)
        self._left -= (end if found < 0 else found) - start
        return found


def delta(base: bytes, text: bytes) -> Delta | None:
    """Return ``text`` as a difference from ``base``, None where that saves next to nothing."""
    return _delta(text, _runs(base, text, _Search()))


def apply(base: bytes, difference: Delta) -> bytes:
    """Return the text that ``difference`` was made from.

    Raises:
        Unresolved: ``base`` is not the text that it was made against.
    """
    pieces, size = [], 0
    for part in difference.parts:
        if isinstance(part, str):
            piece = part.encode()
        else:
            start, length = part
            if start < 0 or length < 0 or start + length > len(base):
                raise Unresolved("the base is shorter than a range of it")
            piece = base[start : start + length]
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_TEXT_BYTES:
            raise Unresolved(f"a text has more than {_MAX_TEXT_BYTES} bytes")
    text = b"".join(pieces)
    if zlib.crc32(text) != difference.crc:
        raise Unresolved("a text does not match its checksum")
    return text


def expand(exchange: Exchange, base: Texts) -> tuple[Exchange, Texts]:
    """Make a record from a shard whole; ``base`` are the texts of the record that it names.

    Returns the record and its texts.

    Raises:
        Unresolved: the base is not the record that it was made against.
    """
    repeats = exchange.repeats
    if repeats is None:
        return exchange, Texts.of(exchange)
    request, tap = exchange.request, list(exchange.tap)
    body = None
    if repeats.body is not None:
        body = apply(base.body, repeats.body)
        request = msgspec.structs.replace(request, body=Body(text=_decoded(body)))
    lines: dict[int, bytes] = {}
    for number, (index, difference) in enumerate(repeats.tap):
        if number >= len(base.tap) or not 0 <= index < len(tap):
            raise Unresolved("the base has fewer long tap lines, or the record fewer lines")
        lines[index] = apply(base.tap[number][1], difference)
        tap[index] = _decoded(lines[index])
    whole = msgspec.structs.replace(exchange, request=request, tap=tap, repeats=None)
    return whole, Texts.of(whole, body, lines)


@dataclass
class _Kept:
    """A record that later ones may be stored against.

    ``chain`` counts the earlier records that have to be read to make it whole, ``fresh`` the bytes
    written out since the first of them.
    """

    key: str
    place: Place
    texts: Texts
    chain: int
    fresh: int


class History:
    """The last records of one shard, by who sent them. Not safe for use by several threads."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        """``max_bytes``: bound on the texts kept in memory."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Place, _Kept] = OrderedDict()
        self._by_key: dict[str, deque[Place]] = {}

    def encode(self, record: Record, place: Place) -> bytes:
        """Return the record as the line that is to be written at ``place``, and remember it.

        Places have to ascend. After an ``Exception`` (a text that is not Unicode) the place is
        free; after a return the line has to be written there, or this history given up.
        """
        if not isinstance(record, Exchange):
            return encode(record)
        texts = Texts.of(record)
        kept = _Kept(_key(record), place, texts, 0, 0)
        base, continued = None, False
        if texts.size:
            base = self._base(kept.key, texts)
        if base is not None:
            shortened = _shorten(record, texts, *base)
            if shortened is not None:
                shared = _shared(shortened)
                continued = base[0].texts.size - shared <= _ASIDE
                # Long chains are cut, but at most once for each doubling: what is stored stays
                # linear in what is new.
                if base[0].chain < _LONG_CHAIN or 2 * base[0].fresh < texts.size:
                    kept.chain = base[0].chain + 1
                    kept.fresh = base[0].fresh + texts.size - shared
                    record = shortened
        line = encode(record)
        if texts.size:
            if base is not None and continued:
                # What goes on from the base goes on from this record too, in all likelihood.
                self._forget(base[0].place)
            self._remember(kept)
        return line

    def _base(self, key: str, texts: Texts) -> tuple[_Kept, list[_Run]] | None:
        """Find the record whose body shares most with this one's, and what.

        Subagents take turns, so it need not be the last one. The one that begins most like this one
        is most likely it, and then the others need not be looked through.
        """
        best: tuple[_Kept, list[_Run]] | None = None
        most = -1
        candidates = [self._kept[place] for place in reversed(self._by_key.get(key, ()))]
        candidates.sort(key=lambda kept: -_common_start(kept.texts.body, texts.body))
        search = _Search()
        for kept in candidates:
            runs = _runs(kept.texts.body, texts.body, search)
            shared = sum(length for _, _, length in runs)
            if shared > most:
                best, most = (kept, runs), shared
            if len(kept.texts.body) - shared <= _ASIDE:
                break
        return best

    def _remember(self, kept: _Kept) -> None:
        self._kept[kept.place] = kept
        self._bytes += kept.texts.size
        places = self._by_key.setdefault(kept.key, deque())
        places.append(kept.place)
        if len(places) > _CANDIDATES:
            self._forget(places[0])
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, place: Place) -> None:
        kept = self._kept.pop(place)
        self._bytes -= kept.texts.size
        places = self._by_key[kept.key]
        places.remove(place)
        if not places:
            del self._by_key[kept.key]


def _key(exchange: Exchange) -> str:
    session = exchange.session
    return session.run or session.session or session.peer.rpartition(":")[0]


def _shorten(exchange: Exchange, texts: Texts, base: _Kept, runs: list[_Run]) -> Exchange | None:
    """Return the record with what it shares with ``base`` left out, None if that is nothing.

    ``runs``: what their bodies share.
    """
    body = _delta(texts.body, runs)
    tap, lines = list(exchange.tap), []
    for (_, before), (index, line) in zip(base.texts.tap, texts.tap, strict=False):
        difference = delta(before, line)
        if difference is None:
            break  # They are numbered from the first.
        lines.append((index, difference))
        tap[index] = ""
    if body is None and not lines:
        return None
    request = exchange.request
    if body is not None:
        request = msgspec.structs.replace(request, body=None)
    repeats = Repeats(*base.place, body, lines)
    return msgspec.structs.replace(exchange, request=request, tap=tap, repeats=repeats)


def _shared(shortened: Exchange) -> int:
    """Return how many bytes of its base a record uses."""
    repeats = shortened.repeats
    assert repeats is not None
    differences = [difference for _, difference in repeats.tap]
    if repeats.body is not None:
        differences.append(repeats.body)
    return sum(p[1] for d in differences for p in d.parts if not isinstance(p, str))


def _delta(text: bytes, runs: list[_Run]) -> Delta | None:
    parts: list[Part] = []
    end = shared = 0
    for there, here, length in runs:
        start, stop = _character(text, here), _character(text, here + length, back=True)
        if stop - start < _MIN_RUN:
            continue
        if start > end:
            parts.append(text[end:start].decode())
        parts.append((there + start - here, stop - start))
        end, shared = stop, shared + stop - start
    if shared < _MIN_TEXT // 2:
        return None
    if end < len(text):
        parts.append(text[end:].decode())
    return Delta(zlib.crc32(text), parts)


def _runs(base: bytes, text: bytes, search: _Search) -> list[_Run]:
    """Return what two texts share, in the order of both: both ends, and what lies between."""
    if len(text) < _MIN_TEXT or len(base) < _MIN_TEXT:
        return []
    limit = min(len(base), len(text))
    prefix = _common_prefix(base, 0, text, 0, limit)
    suffix = _common_suffix(base, len(base), text, len(text), limit - prefix)
    inner = _inner_runs(base, text, prefix, suffix, search)
    return [(0, 0, prefix), *inner, (len(base) - suffix, len(text) - suffix, suffix)]


def _inner_runs(base: bytes, text: bytes, prefix: int, suffix: int, search: _Search) -> list[_Run]:
    """Find what is shared between the ends.

    Greedy: a piece of the text, further and further on, is looked for in the base.
    """
    runs: list[_Run] = []
    there, here = prefix, prefix
    there_end, here_end = len(base) - suffix, len(text) - suffix
    searches, skip = 0, 0
    while (
        len(runs) < _MAX_RUNS
        and searches < _MAX_SEARCHES
        and there_end - there >= _MIN_RUN
        and here_end - here - skip >= _MIN_RUN
    ):
        piece = here + skip
        found = search.find(base, text[piece : piece + _MIN_RUN], there, there_end)
        searches += 1
        if found < 0:
            skip = 2 * skip + _MIN_RUN
            continue
        back = _common_suffix(base, found, text, piece, min(skip, found - there))
        limit = min(there_end - found, here_end - piece)
        length = back + _common_prefix(base, found, text, piece, limit)
        runs.append((found - back, piece - back, length))
        there, here, skip = found - back + length, piece - back + length, 0
    return runs


def _common_start(a: bytes, b: bytes) -> int:
    return _common_prefix(a, 0, b, 0, min(len(a), len(b)))


def _common_prefix(a: bytes, at_a: int, b: bytes, at_b: int, limit: int) -> int:
    """Return how many bytes, at most ``limit``, are the same from the two places on."""
    size, block = 0, 64
    # Comparing slices runs at the speed of memory: in growing blocks, then ever smaller ones.
    while size < limit:
        step = min(block, limit - size)
        i, j = at_a + size, at_b + size
        if a[i : i + step] != b[j : j + step]:
            break
        size += step
        block = min(2 * block, _BLOCK)
    else:
        return size
    while step > 1:
        half = step // 2
        i, j = at_a + size, at_b + size
        if a[i : i + half] == b[j : j + half]:
            size += half
            step -= half
        else:
            step = half
    return size


def _common_suffix(a: bytes, end_a: int, b: bytes, end_b: int, limit: int) -> int:
    """Return how many bytes, at most ``limit``, are the same before the two places."""
    size, block = 0, 64
    while size < limit:
        step = min(block, limit - size)
        i, j = end_a - size, end_b - size
        if a[i - step : i] != b[j - step : j]:
            break
        size += step
        block = min(2 * block, _BLOCK)
    else:
        return size
    while step > 1:
        half = step // 2
        i, j = end_a - size, end_b - size
        if a[i - half : i] == b[j - half : j]:
            size += half
            step -= half
        else:
            step = half
    return size


def _character(text: bytes, at: int, back: bool = False) -> int:
    """Return the nearest place from ``at`` on (or back) where a character of UTF-8 begins."""
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at += -1 if back else 1
    return at


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise Unresolved("a text is not UTF-8") from None
