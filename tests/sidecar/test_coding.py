"""Content codings: every one undone, bombs and damaged bodies refused."""

import contextlib
import gzip
import zlib
from collections.abc import Callable
from hashlib import sha256

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.bodies import coding

BODY = "".join(sha256(b"%d" % k).hexdigest() for k in range(10_000)).encode()


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "DEFLATE": raw_deflate,
    "br": brotli.compress,
    "zstd": zstd,
    "gzip, zstd": lambda body: zstd(gzip.compress(body)),
    "identity, br": brotli.compress,
    "": bytes,
}
EVERY_CODING = pytest.mark.parametrize("encoding", PACKERS)


@EVERY_CODING
@pytest.mark.parametrize("body", [b"", b"a", BODY])
def test_round_trip(encoding, body):
    assert coding.decode(PACKERS[encoding](body), encoding) == body


@pytest.mark.parametrize("encoding", [name for name in PACKERS if name])
@pytest.mark.parametrize("body", [b"a" * 100_000, BODY], ids=["bomb", "dense"])
def test_size_limit(encoding, body):
    packed, size = PACKERS[encoding](body), len(body)
    assert coding.decode(packed, encoding, limit=size) == body
    with pytest.raises(ValueError, match=f"more than {size - 1} bytes"):
        coding.decode(packed, encoding, limit=size - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "DEFLATE", "br", "zstd"])
def test_bodies_that_are_cut_off(encoding):
    packed = PACKERS[encoding](BODY)
    half = packed[: len(packed) // 2]
    found = coding.decode(half, encoding, cut=True)
    assert BODY.startswith(found) and len(found) > 1000
    if encoding != "zstd":
        with pytest.raises(ValueError, match="cut off"):
            coding.decode(half, encoding)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_several_members(encoding):
    packed = PACKERS[encoding](b"one ") + PACKERS[encoding](b"two")
    assert coding.decode(packed, encoding) == b"one two"


@pytest.mark.parametrize(
    "encoding", ["compress", "gzip, nonsense", ",".join(["gzip"] * 5), "gzip", "br", "zstd"]
)
def test_what_can_not_be_decoded(encoding):
    with pytest.raises(ValueError, match=r"encoding|damaged"):
        coding.decode(b"nonsense, surely", encoding, cut=True)


@settings(deadline=None)
@given(st.sampled_from(["gzip", "deflate", "br", "zstd", "br, gzip"]), st.binary(max_size=200))
def test_any_bytes(encoding, body):
    with contextlib.suppress(ValueError):
        coding.decode(body, encoding, cut=True)
