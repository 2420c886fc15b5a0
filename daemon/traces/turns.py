"""Model calls as turns of conversations: which call went on from which. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from daemon import exchange as exchanges
from daemon import runs
from daemon.exchange import Entry
from daemon.protocols import conversation
from daemon.protocols import read as protocols
from daemon.protocols.conversation import Message, Said
from daemon.protocols.shape import ProtocolError
from daemon.runs import Caller
from sidecar.traces.record import Exchange
from tokenization.calls import Item


@dataclass(frozen=True)
class Turn:
    """A model call, read. ``said`` is None where its bodies could not be, ``problem`` says why."""

    exchange: Exchange
    said: Said | None
    problem: str | None
    run: str
    caller: Caller

    @property
    def model(self) -> str:
        """The model that the agent asked for."""
        return self.said.request.model if self.said else ""

    def entries(self) -> list[Entry]:
        """Return its sampled outputs with tokens and checks, as the daemon sees them."""
        return exchanges.read(self.exchange)


@dataclass(frozen=True)
class Conversation:
    """One choice of a call that no later call went on from, with the calls it went on from.

    ``earlier`` maps the number of dialogue items before a reply in the history to the turn that
    gave this reply.
    """

    last: Turn
    choice: int
    earlier: dict[int, Turn]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole history and the reply."""
        assert self.last.said is not None
        return (*self.last.said.request.messages, self.last.said.replies[self.choice].message)


def read_turn(exchange: Exchange) -> Turn:
    """Read a model call; never fails."""
    said, problem = None, None
    try:
        said = protocols.read(exchange)
    except ProtocolError as error:
        problem = str(error)
    caller = runs.read_caller(exchange)
    return Turn(exchange, said, problem, runs.run_key(exchange, caller).name, caller)


def conversations(turns: Iterable[Turn]) -> list[Conversation]:
    """Put turns together by the histories that their requests repeat, in order of their last call.

    A call goes on from an earlier one of the same run and agent whose history and reply its own
    history begins with. Only calls that were answered to the end take part. A request that holds
    no history (a raw prompt, or references to what the server has stored) stands for itself.
    """
    found: list[Conversation] = []
    groups: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    for turn in turns:
        if turn.said is not None and turn.said.complete and turn.said.replies:
            groups[turn.run, turn.caller.agent].append(turn)
    for group in groups.values():
        found += _group(sorted(group, key=lambda turn: turn.exchange.started))
    return sorted(found, key=lambda one: (one.last.exchange.started, one.choice))


def _group(turns: Sequence[Turn]) -> list[Conversation]:
    replied: dict[tuple[int, int], tuple[Turn, int]] = {}
    """(Items, their hash) → the turn and choice whose history and reply these are."""
    went_on: set[tuple[str, int]] = set()
    ends: list[Conversation] = []
    for turn in turns:
        assert turn.said is not None
        try:
            dialogue = conversation.dialogue(turn.said.request)
            replies = conversation.replies(turn.said)
        except ProtocolError:
            continue
        earlier: dict[int, Turn] = {}
        items = dialogue.items if dialogue is not None else ()
        digest = 0
        for k, item in enumerate(items, 1):
            digest = _next(digest, item)
            if before := replied.get((k, digest)):
                parent, choice = before
                went_on.add((parent.exchange.id, choice))
                earlier[_history(parent)] = parent
        for choice, reply in replies.items():
            end = digest
            for item in reply.items:
                end = _next(end, item)
            ends.append(Conversation(turn, choice, earlier))
            if dialogue is not None and reply.items:
                replied[len(items) + len(reply.items), end] = turn, choice
    return [end for end in ends if (end.last.exchange.id, end.choice) not in went_on]


def _history(turn: Turn) -> int:
    assert turn.said is not None
    dialogue = conversation.dialogue(turn.said.request)
    return len(dialogue.items) if dialogue is not None else 0


def _next(digest: int, item: Item) -> int:
    return hash((digest, item))
