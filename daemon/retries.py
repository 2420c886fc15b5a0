"""Which call of a run is another attempt at an earlier one. Pure.

Harnesses retry without saying so, count wrongly where they count (``X-Stainless-Retry-Count`` is
reset by outer retry loops and stays 0 in Claude Code), and don't always send the same request
again: some carry the broken half of the first attempt into it. And equal requests are not always
retries: nested agents begin with equal prompts. So a retry needs a former attempt that ended
without a complete success, from the same agent, before the retry began.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from daemon.protocols import conversation
from daemon.protocols.conversation import Request, Said
from daemon.protocols.shape import ProtocolError
from sidecar.traces.record import Exchange
from tokenization.calls import Item

WINDOW_S = 900.0
"""Longest time between the end of an attempt and the begin of the next, in seconds: more than the
back-offs and ``Retry-After`` that were seen, a fraction of the pause before a user asks again."""

_OPENING = 24
_OVERLAP_S = 0.1

Kind = Literal["repeat", "continuation"]


@dataclass(frozen=True)
class Attempt:
    """One exchange of a run. ``started`` and ``ended`` in Unix seconds.

    ``agent`` tells the run's agents apart (``who``). ``sound``: it ended with a complete success.
    ``context`` and ``digest`` stand for the request: system prompt with tools, and history; for
    one that can't be read ``digest`` stands for its bytes. ``opening`` is that of the reply, as far
    as it came (``opening``). ``chain`` are the digests of the history after each item, the last is
    ``digest``; ``openings`` those of the model's own items in it, by position. Both may be empty:
    then the attempt can't be recognised as a continuation.
    """

    exchange: str
    agent: str
    started: float
    ended: float
    sound: bool
    context: str
    digest: str
    opening: str = ""
    chain: Sequence[str] = ()
    openings: Sequence[str] = ()


@dataclass(frozen=True)
class Retry:
    """``of``: the exchange of the attempt before. ``repeat``: the same request again;
    ``continuation``: its history goes on from the broken half of the reply."""

    of: str
    kind: Kind


def who(session: str, agent: str) -> str:
    """Return what tells the agents of a run apart: the ids that the harness sends, if any."""
    return f"{session}/{agent}"


def attempt(exchange: Exchange, agent: str, request: Request | None, said: Said | None) -> Attempt:
    """Return an exchange as an attempt; ``request`` is None where it can't be read, ``said`` where
    it or the reply can't."""
    status = exchange.response.status if exchange.response else 0
    sound = exchange.outcome == "complete" and 200 <= status < 300
    if exchange.route != "other":
        sound = sound and said is not None and said.complete
    whole = Attempt(
        exchange=exchange.id,
        agent=agent,
        started=exchange.started,
        ended=exchange.ended,
        sound=sound,
        context="",
        digest=_of_bytes(exchange),
    )
    if request is None:
        return whole
    try:
        dialogue = conversation.dialogue(request)
        replies = conversation.replies(said) if said else {}
    except ProtocolError:
        return whole
    if dialogue is None or not dialogue.items:
        return whole
    digests = chain(dialogue.items)
    spoken = [item for reply in replies.values() for item in reply.items]
    return replace(
        whole,
        context=dialogue.context,
        digest=digests[-1],
        opening=opening(spoken[0]) if spoken else "",
        chain=digests,
        openings=openings(dialogue.items),
    )


def find(attempts: Iterable[Attempt], known: Mapping[str, str] | None = None) -> dict[str, Retry]:
    """Return the retries among a run's exchanges, by exchange id.

    An attempt is followed by one retry at most; ``known`` maps the retries that have been found
    before to the attempts that they repeat. Of several failures that a request could be the retry
    of, it is that of the oldest: parallel calls that fail together are retried in their order.
    """
    found: dict[str, Retry] = {}
    known = known or {}
    taken = set(known.values())
    failures: list[Attempt] = []
    for attempt in sorted(attempts, key=lambda a: (a.started, a.exchange)):
        for former in failures:
            if attempt.exchange in known:
                break
            if former.exchange in taken or not _may_follow(former, attempt):
                continue
            if kind := _compare(former, attempt):
                found[attempt.exchange] = Retry(former.exchange, kind)
                taken.add(former.exchange)
                break
        if not attempt.sound:
            failures.append(attempt)
    return found


def chain(items: Sequence[Item]) -> list[str]:
    """Return the digests of a history after each of its items."""
    digests = []
    state = blake2b(digest_size=12)
    for item in items:
        for text in item:
            raw = text.encode("utf-8", "surrogatepass")
            state.update(b"%d:" % len(raw))
            state.update(raw)
        state.update(b";")
        digests.append(state.hexdigest())
    return digests


def openings(items: Sequence[Item]) -> list[str]:
    """Return for each item how it begins when the model said it, and "" when it did not."""
    return [opening(item) if item[0] in ("assistant", "call") else "" for item in items]


def opening(item: Item) -> str:
    """Return a digest of an item's kind and the begin of its text.

    Only the begin: what a harness keeps of a broken reply may end earlier than what was sent.
    """
    text = f"{item[0]}\\0{item[1][:_OPENING].strip()}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _of_bytes(exchange: Exchange) -> str:
    body = exchange.request.body
    return "bytes:" + blake2b(body.raw(), digest_size=12).hexdigest() if body else ""


def _may_follow(former: Attempt, attempt: Attempt) -> bool:
    # A client that hangs up may be back before the sidecar has noticed that it had gone.
    pause = attempt.started - former.ended
    return former.agent == attempt.agent and -_OVERLAP_S <= pause <= WINDOW_S


def _compare(former: Attempt, attempt: Attempt) -> Kind | None:
    if not former.digest or former.context != attempt.context:
        return None
    if former.digest == attempt.digest:
        return "repeat"
    if not former.opening or former.digest not in attempt.chain[:-1]:
        return None
    follows = attempt.chain.index(former.digest) + 1
    return "continuation" if attempt.openings[follows] == former.opening else None
