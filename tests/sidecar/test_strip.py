import copy
import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.tokens.strip import BodyCutter, Cutter, SseCutter, marker
from tokenization.tap import wire

NONCE = "0123456789abcdef0123456789abcdef"
EVENT = st.dictionaries(st.text(max_size=4), st.text(max_size=12), max_size=2)
# Text that looks almost like a tap line, beside real SSE and arbitrary bytes.
PIECE = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [
            b"data: {}\n\n",
            b"data: a\r\n\r\n",
            b": ping\n\n",
            b"\n",
            b":",
            b": ",
            b": 0123456",
            f"x: {NONCE} mid-line\n".encode(),
            f": {NONCE}x not the marker\n".encode(),
        ]
    ),
)
# A tap line stands at the start of a line; what precedes it ends in a newline.
STREAM = st.lists(st.one_of(PIECE.map(lambda p: (p, None)), EVENT.map(lambda e: (b"", e))))


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data at the given places, counted modulo its length."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def run(cutter: Cutter, chunks: list[bytes]) -> bytes:
    return b"".join([cutter.feed(chunk) for chunk in chunks] + [cutter.finish()])


def build(pieces: list[tuple[bytes, dict[str, str] | None]]) -> tuple[bytes, bytes, list[bytes]]:
    """Return the stream with tap lines, the stream without, and the lines' JSON."""
    tapped = plain = b""
    lines = []
    for text, event in pieces:
        if event is None:
            tapped, plain = tapped + text, plain + text
        elif plain == b"" or plain.endswith(b"\n"):
            line = wire.line(NONCE, event)
            tapped += line
            lines.append(line[len(f": {NONCE} ") : -1])
    return tapped, plain, lines


@given(STREAM, st.lists(st.integers(min_value=0), max_size=30))
@example([(b"a\n", None), (b"", {"k": "v"}), (b"b\n", None)], [])
def test_any_chunking_of_a_stream_gives_the_stream_without_tap_lines(pieces, cuts):
    tapped, plain, lines = build(pieces)
    for chunks in (chunks_of(tapped, cuts), [tapped[i : i + 1] for i in range(len(tapped))]):
        cutter = SseCutter(NONCE)
        assert run(cutter, chunks) == plain
        assert [line.encode() for line in cutter.lines] == lines


@given(STREAM)
def test_nothing_is_held_back_but_what_may_become_a_tap_line(pieces):
    tapped, plain, _ = build(pieces)
    cutter = SseCutter(NONCE)
    passed = b""
    for i in range(len(tapped)):
        passed += cutter.feed(tapped[i : i + 1])
        held = copy.deepcopy(cutter).finish()
        assert marker(NONCE).startswith(held)
        assert plain.startswith(passed)


def test_an_event_goes_on_at_once_and_a_torn_tap_line_is_dropped():
    cutter = SseCutter(NONCE)
    assert cutter.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert cutter.feed(f': {NONCE} {{"e"'.encode()) == b""
    assert cutter.finish() == b""
    assert cutter.lines == []


def test_a_torn_marker_is_dropped_if_it_can_be_no_comment_of_the_upstreams():
    torn = f": {NONCE[:10]}".encode()
    assert run(SseCutter(NONCE), [b"data: 1\n\n", torn]) == b"data: 1\n\n"
    assert run(SseCutter(NONCE), [b"data: 1\n\n", b": "]) == b"data: 1\n\n: "


def test_another_nonce_is_not_ours():
    text = b": ffffffffffffffffffffffffffffffff {}\ndata: 1\n\n"
    assert run(SseCutter(NONCE), [text]) == text


@given(st.binary(max_size=60), st.lists(EVENT, max_size=4), st.lists(st.integers(0), max_size=20))
def test_any_chunking_of_a_body_gives_the_body_and_its_lines(body, events, cuts):
    tail = b"".join(wire.line(NONCE, event) for event in events)
    cutter = BodyCutter(len(body), NONCE)
    assert run(cutter, chunks_of(body + tail, cuts)) == body
    assert len(cutter.lines) == len(events)


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0), max_size=20))
def test_a_body_is_complete_only_at_the_end_of_the_reply(body, cuts):
    cutter = BodyCutter(len(body), NONCE)
    assert sum(len(cutter.feed(chunk)) for chunk in chunks_of(body, cuts)) < len(body)
    whole, cutter = body[:-1], BodyCutter(len(body), NONCE)
    assert cutter.feed(whole) == whole, "what can't complete the body is not held back"
