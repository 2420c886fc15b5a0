"""Repeated history: what is left out of a shard is filled in again, byte for byte, or missed."""

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.traces import history as history_module
from sidecar.traces.history import History, Texts, Unresolved, apply, delta, expand
from sidecar.traces.record import Body, Exchange, Request, Response, Session, decode, encode

WORDS = [f"word{number} " for number in range(500)] + ["übermäßig ", "日本 ", "🙂 ", '"q" ', "\\ "]


def text(seed: object, size: int) -> str:
    generator = random.Random(repr(seed))
    return "".join(generator.choice(WORDS) for _ in range(size))


def exchange(body: str, tap: list[str] | None = None, *, run: str = "r", key: str = "") -> Exchange:
    return Exchange(
        id=key or "id",
        route="chat",
        session=Session(run=run, peer="127.0.0.1:1"),
        upstream="http://upstream",
        request=Request("POST", "/v1/chat/completions", [("a", "b")], Body.of(body.encode())),
        started=1.0,
        ended=2.0,
        outcome="complete",
        response=Response(200, [], Body.of(b"{}")),
        tap=tap or [],
    )


def turn(number: int, *, agent: str = "", tools_last: bool = False) -> Exchange:
    """A call of a conversation that grows; the last message carries a mark that moves on."""
    messages = [{"role": "user", "content": text((agent, k), 60)} for k in range(number + 1)]
    messages[-1]["cache_control"] = "ephemeral"
    tools = [{"name": f"tool{k}", "description": text(k, 50)} for k in range(5)]
    body = {"model": "m", "messages": messages, "tools": tools}
    if not tools_last:
        body = {"tools": tools} | body
    generator = random.Random(agent)
    ids = [generator.randrange(150_000) for _ in range(100 * (number + 1))]
    prompt = {"e": "prompt", "r": 0, "id": f"chatcmpl-{number}{agent}", "ids": ids, "params": {}}
    token = {"e": "tok", "r": 0, "i": 0, "ids": [number], "lp": [-0.5], "v": "v0"}
    taps = [json.dumps(event, separators=(",", ":")) for event in (prompt, token)]
    return exchange(json.dumps(body, ensure_ascii=False), taps, key=f"{agent}{number}")


def read_back(lines: dict[tuple[int, int], bytes]) -> list[Exchange]:
    """Make the records of a shard whole again, from the first on."""
    texts: dict[tuple[int, int], Texts] = {}
    found = []
    for place, line in lines.items():
        entry = decode(line)
        assert isinstance(entry, Exchange)
        repeats = entry.repeats
        base = texts[repeats.frame, repeats.line] if repeats else Texts(b"", ())
        whole, texts[place] = expand(entry, base)
        assert texts[place] == Texts.of(whole)
        found.append(whole)
    return found


unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=2000)


@given(st.lists(unicode, min_size=1, max_size=6), st.data())
def test_a_difference_gives_the_text_back(pieces, data):
    padded = [piece + text(piece, 40) for piece in pieces]
    base = "".join(padded).encode()
    others = st.sampled_from([*padded, "x", "é", text("new", 100)])
    changed = "".join(data.draw(st.lists(others, max_size=8))).encode()
    difference = delta(base, changed)
    if difference is not None:
        line = msgspec.json.encode(difference)
        assert apply(base, msgspec.json.decode(line, type=type(difference))) == changed
    same = delta(base, base)
    assert same is None or same.parts == [(0, len(base))]


@pytest.mark.parametrize("tools_last", [False, True])
def test_a_growing_conversation_takes_space_for_what_is_new(tools_last):
    history = History()
    turns = [turn(number, tools_last=tools_last) for number in range(30)]
    lines = {(7 * k, 0): history.encode(each, (7 * k, 0)) for k, each in enumerate(turns)}
    assert read_back(lines) == turns
    sizes = [len(line) for line in lines.values()]
    whole = [len(encode(each)) for each in turns]
    assert whole[29] > 5 * whole[2], "the conversation grows"
    assert max(sizes[2:]) < 1.5 * min(sizes[2:]), "what a turn adds does not"
    assert sum(sizes) < 0.15 * sum(whole)
    # What is new can be read as it is.
    parts = json.loads(lines[203, 0])["repeats"]["body"]["parts"]
    written = "".join(part for part in parts if isinstance(part, str))
    assert json.dumps(text(("", 29), 60), ensure_ascii=False) in written


def test_subagents_take_turns():
    history = History()
    turns = [turn(number, agent=agent) for number in range(6) for agent in "abcdefgh"]
    lines = {(k, 0): history.encode(each, (k, 0)) for k, each in enumerate(turns)}
    assert read_back(lines) == turns
    bases = [decode(line).repeats for line in lines.values()]
    assert [base.frame for base in bases[8:]] == list(range(40)), "each one's own last call"


def test_runs_are_kept_apart_and_the_memory_is_bounded():
    history = History(max_bytes=30_000)
    for number in range(50):
        history.encode(exchange(text(number, 200), run=f"run {number}"), (number, 0))
    assert 0 < history._bytes <= 30_000
    assert history._bytes == sum(kept.texts.size for kept in history._kept.values())
    assert len(history._by_key) == len(history._kept) < 50


def test_a_record_that_can_not_be_encoded_leaves_no_trace():
    history = History()
    history.encode(turn(0), (0, 0))
    broken = msgspec.structs.replace(turn(1), error="\udcff")
    with pytest.raises(UnicodeEncodeError):
        history.encode(broken, (0, 1))
    lines = {(0, 0): encode(turn(0)), (0, 1): history.encode(turn(2), (0, 1))}
    assert read_back(lines) == [turn(0), turn(2)]


def test_a_very_long_chain_is_cut_now_and_then():
    history = History()
    bodies = [text(0, 40 * number) for number in range(1, 400)]
    lines = [history.encode(exchange(body), (k, 0)) for k, body in enumerate(bodies)]
    whole = [k for k, line in enumerate(lines) if decode(line).repeats is None]
    assert whole[0] == 0 and 1 <= len(whole) <= 4
    assert sum(map(len, lines)) < 3.5 * len(bodies[-1]) + 400 * 600


def test_bodies_that_are_short_absent_or_no_text_are_left_alone():
    history = History()
    binary = msgspec.structs.replace(
        exchange(""), request=Request("POST", "/", [], Body.of(bytes(range(256)) * 9))
    )
    absent = msgspec.structs.replace(exchange(""), request=Request("GET", "/", []))
    for number, each in enumerate([exchange("x"), binary, absent] * 2):
        assert history.encode(each, (number, 0)) == encode(each)


@pytest.mark.parametrize(
    "parts",
    [[[0, 9000]], [[-1, 5]], [[0, -5]], [[0, 600]], ["wrong"], [[1, 599]], []],
)
def test_what_does_not_fit_is_never_a_text(parts):
    difference = delta(b"a" * 600, b"a" * 590 + b"b" * 100)
    assert difference is not None
    damaged = msgspec.structs.replace(difference, parts=parts)
    with pytest.raises(Unresolved):
        apply(b"a" * 600, damaged)


def test_another_base_is_noticed():
    history = History()
    lines = [history.encode(turn(number), (number, 0)) for number in range(2)]
    entry = decode(lines[1])
    for wrong in (Texts(b"", ()), Texts.of(turn(0, agent="a"))):
        with pytest.raises(Unresolved):
            expand(entry, wrong)


def test_changes_in_several_places_cost_little():
    """A request number in the system prompt, marks on the last two messages, tools at the end."""
    history, lines, turns = History(), {}, []
    for number in range(20):
        messages = [{"role": "user", "content": text(k, 60)} for k in range(number + 2)]
        for marked in messages[-2:]:
            marked["cache_control"] = {"type": "ephemeral"}
        body = {
            "system": [{"text": f"billing: {number * 7919}"}, {"text": text("system", 300)}],
            "messages": messages,
            "tools": [{"name": f"tool{k}", "description": text(("tool", k), 90)} for k in range(5)],
            "metadata": {"user_id": f"user-{number}"},
        }
        turns.append(exchange(json.dumps(body)))
        lines[number, 0] = history.encode(turns[-1], (number, 0))
    assert read_back(lines) == turns
    assert max(len(line) for line in list(lines.values())[1:]) < 2500
    assert len(encode(turns[-1])) > 15_000
    again = decode(history.encode(turns[-1], (20, 0)))
    assert again.repeats.body.parts == [(0, len(turns[-1].request.body.text))]


def test_a_long_search_is_given_up(monkeypatch):
    """Ends are still shared; what lies between is written out."""
    shared = text("shared", 300).encode()
    base = b"a" * 600 + text("x", 200).encode() + shared + b"b" * 600
    now = b"a" * 600 + shared + text("y", 200).encode() + b"b" * 600
    monkeypatch.setattr("sidecar.traces.history._MAX_SEARCHED", len(base))
    whole = delta(base, now)
    monkeypatch.setattr("sidecar.traces.history._MAX_SEARCHED", 100)
    short = delta(base, now)
    assert whole is not None and apply(base, whole) == now and len(whole.parts) > 3
    assert short is not None and apply(base, short) == now
    assert [type(part) for part in short.parts] == [tuple, str, tuple]


def test_all_searches_of_a_record_share_one_bound(monkeypatch):
    looked = 0
    find = history_module._Search.find

    def counting(self, base, piece, start, end):
        nonlocal looked
        before = self._left
        found = find(self, base, piece, start, end)
        looked += before - self._left
        return found

    monkeypatch.setattr(history_module._Search, "find", counting)
    monkeypatch.setattr("sidecar.traces.history._MAX_SEARCHED", 50_000)
    history = History()
    for number in range(20):
        looked = 0
        history.encode(exchange("same" * 200 + text(number, 2000)), (number, 0))
        assert looked <= 50_000
    assert looked > 25_000
