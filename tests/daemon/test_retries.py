import msgspec

from daemon.protocols import read as protocols
from daemon.retries import WINDOW_S, Attempt, Retry, attempt, chain, find, opening, openings
from sidecar.traces.record import Body, Exchange, Response
from tests.daemon.recorded import exchange

ASKED = ("user", "what is it?")


def made(
    name: str,
    started: float,
    *,
    sound: bool = True,
    items: tuple[tuple[str, ...], ...] = (ASKED,),
    said: tuple[str, ...] | None = None,
    agent: str = "",
    lasted: float = 1.0,
    context: str = "c",
) -> Attempt:
    digests = chain(items)
    return Attempt(
        name,
        agent,
        started,
        started + lasted,
        sound,
        context,
        digests[-1],
        opening(said) if said else "",
        digests,
        openings(items),
    )


def read(call: Exchange) -> Attempt:
    said = protocols.read(call)
    return attempt(call, "s/", said.request, said)


def test_the_same_request_after_a_failure():
    found = find([made("a", 0, sound=False), made("b", 2)])
    assert found == {"b": Retry("a", "repeat")}


def test_a_row_of_failures_is_a_row_of_retries():
    calls = [
        made(name, at, sound=name == "d") for name, at in zip("abcd", (0, 2, 4, 6), strict=True)
    ]
    assert {k: v.of for k, v in find(calls).items()} == {"b": "a", "c": "b", "d": "c"}


def test_equal_requests_that_succeeded_are_separate_calls():
    nested = [made(name, k) for k, name in enumerate("abcd")]
    assert find(nested) == {}


def test_of_parallel_equal_calls_each_failure_has_its_own_retry():
    calls = [
        made("a", 0.0, sound=False),
        made("b", 0.1, sound=False),
        made("sound", 0.2),
        made("a2", 1.5),
        made("b2", 1.6),
    ]
    assert {k: v.of for k, v in find(calls).items()} == {"a2": "a", "b2": "b"}


def test_what_began_before_the_failure_ended_is_no_retry():
    assert find([made("a", 0, sound=False, lasted=10), made("b", 5)]) == {}


def test_other_agents_other_requests_and_late_ones_are_no_retries():
    failed = made("a", 0, sound=False)
    assert find([failed, made("b", 2, agent="other")]) == {}
    assert find([failed, made("b", 2, items=(("user", "else"),))]) == {}
    assert find([failed, made("b", 2, context="other tools")]) == {}
    assert find([failed, made("b", 2 + WINDOW_S)]) == {}


def test_a_request_that_goes_on_from_the_broken_half():
    broken = ("assistant", "The answer is a long sentence, and it stops")
    went_on = (ASKED, ("assistant", "The answer is a long sentence, and"), ("user", "resume"))
    calls = [made("a", 0, sound=False, said=broken), made("b", 2, items=went_on)]
    assert find(calls) == {"b": Retry("a", "continuation")}
    other = (ASKED, ("assistant", "Something else"), ("user", "resume"))
    assert find([calls[0], made("b", 2, items=other)]) == {}
    assert find([made("a", 0, said=broken), made("b", 2, items=went_on)]) == {}


def test_a_broken_item_may_stand_twice_in_later_histories():
    """Codex keeps the items that were whole when the stream broke, and then repeats the turn."""
    kept = ("assistant", "I will run a command.")
    call, result = ("call", "bash", "{}"), ("result", "ok")
    calls = [
        made("a", 0, sound=False, said=kept),
        made("b", 2, items=(ASKED, kept), said=kept),
        made("c", 4, items=(ASKED, kept, kept, call, result)),
    ]
    assert find(calls) == {"b": Retry("a", "continuation")}


def test_known_retries_keep_their_attempts():
    calls = [
        made("a", 0, sound=False),
        made("b", 0, sound=False),
        made("a2", 2),
        made("late", 3),
    ]
    assert find(calls, {"a2": "a"}) == {"late": Retry("b", "repeat")}


def test_digests_tell_histories_apart():
    assert chain([("user", "a"), ("user", "b")]) != chain([("user", "ab"), ("user", "")])
    assert chain([("user", "a", "b")]) != chain([("user", "a"), ("b",)])
    assert len(set(chain([ASKED, ASKED, ASKED]))) == 3


def test_an_exchange_as_an_attempt():
    call = exchange("1", messages=[{"role": "user", "content": "hi"}], reply="ok")
    found = read(call)
    assert found.sound and found.chain == chain([("user", "hi")])
    assert found.opening == opening(("assistant", "ok"))
    again = exchange("2", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    assert read(again).digest == found.digest


def test_an_attempt_that_failed():
    for broken in (
        exchange("1", status=429),
        exchange("1", outcome="upstream_error"),
        exchange("1", outcome="cancelled"),
    ):
        assert not read(broken).sound


def test_a_stream_without_its_end_is_no_success():
    call = exchange("1")
    cut = b'data: {"choices": [{"index": 0, "delta": {"content": "half a sen"}}]}\n\n'
    headers = [("content-type", "text/event-stream")]
    call = msgspec.structs.replace(call, response=Response(200, headers, Body.of(cut)))
    found = read(call)
    assert not found.sound and found.opening == opening(("assistant", "half a sen"))


def test_requests_that_can_not_be_read_are_compared_by_their_bytes():
    first, second = exchange("1", status=500), exchange("2", started=1002.0)
    found = [attempt(call, "", None, None) for call in (first, second)]
    assert found[0].digest.startswith("bytes:") and find(found) == {"2": Retry("1", "repeat")}
