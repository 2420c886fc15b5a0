"""Content codings of bodies (RFC 9110, section 8.4; RFC 8878 for zstd). Pure."""

import zlib
from collections.abc import Callable

import brotli
import zstandard

LIMIT = 256 * 2**20
"""Largest decoded body in bytes: far above any model call, far below what a bomb unpacks to."""

_MOST_CODINGS = 4
_LARGEST_WINDOW = 2**27


def decode(content: bytes, encoding: str, *, cut: bool = False, limit: int = LIMIT) -> bytes:
    """Undo a ``Content-Encoding``, the last coding first.

    ``cut``: the body may end too early and then gives what it holds so far.

    Raises:
        ValueError: a coding is not known, the body is damaged or cut off (which zstd does not
            tell), or it has more than ``limit`` bytes when decoded.
    """
    names = [name.strip().lower() for name in encoding.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > _MOST_CODINGS:
        raise ValueError(f"{len(names)} content encodings")
    for name in reversed(names):
        decoder = _DECODERS.get(name)
        if decoder is None:
            raise ValueError(f"unknown content encoding {name}")
        try:
            content, whole = decoder(content, limit)
        except (zlib.error, brotli.error, zstandard.ZstdError) as error:
            raise ValueError(f"damaged {name} body: {error}") from None
        if len(content) > limit:
            raise ValueError(f"the decoded body has more than {limit} bytes")
        if not whole and not cut:
            raise ValueError(f"the {name} body is cut off")
    return content


# Each decodes at most one byte beyond the limit, and says whether the body was whole.


def _inflated(content: bytes, limit: int, wbits: int) -> tuple[bytes, bool]:
    found = bytearray()
    whole = False
    while content and len(found) <= limit:
        member = zlib.decompressobj(wbits)
        found += member.decompress(content, limit + 1 - len(found))
        whole = member.eof
        if not whole:
            break
        content = member.unused_data
    return bytes(found), whole


def _gunzip(content: bytes, limit: int) -> tuple[bytes, bool]:
    return _inflated(content, limit, 16 + zlib.MAX_WBITS)


def _inflate(content: bytes, limit: int) -> tuple[bytes, bool]:
    try:
        return _inflated(content, limit, zlib.MAX_WBITS)
    except zlib.error:  # "deflate" is the zlib format, but many send raw deflate.
        return _inflated(content, limit, -zlib.MAX_WBITS)


def _unbrotli(content: bytes, limit: int) -> tuple[bytes, bool]:
    decoder = brotli.Decompressor()
    found = bytearray(decoder.process(content, output_buffer_limit=limit + 1))
    while len(found) <= limit and not decoder.can_accept_more_data():
        if decoder.is_finished():
            break
        found += decoder.process(b"", output_buffer_limit=limit + 1 - len(found))
    return bytes(found), decoder.is_finished()


def _unzstd(content: bytes, limit: int) -> tuple[bytes, bool]:
    decoder = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    found = bytearray()
    with decoder.stream_reader(content, read_across_frames=True) as reader:
        while len(found) <= limit and (chunk := reader.read(min(2**20, limit + 1 - len(found)))):
            found += chunk
    return bytes(found), True


_DECODERS: dict[str, Callable[[bytes, int], tuple[bytes, bool]]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
