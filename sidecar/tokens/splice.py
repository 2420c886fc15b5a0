"""Asks a stock vLLM for tokens: adds request fields in the request's text. Pure.

``return_token_ids`` gives the ids of the prompt and of the sampled tokens, ``logprobs`` the
log-probs of the sampled tokens and no others (chat: with ``top_logprobs`` 0, its default;
completions: 0). Fields are set where they stand, else added at the end; all other bytes stay.
Field meanings: vLLM 0.30, ``entrypoints/openai/{chat_completion,completion}``.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from sidecar.bodies import jsontext
from sidecar.traces.record import Route

Field = Literal["return_token_ids", "logprobs"]

# With ``echo`` vLLM leaves the prompt's text out of a reply that has its ids, and repeats the
# prompt's log-probs; beams are no samples.
_SPOILERS = ("echo", "use_beam_search")


@dataclass(frozen=True)
class Spliced:
    """A request's text as it is to go upstream, and what in the reply is there because of us.

    A field that is not in ``added`` was asked for by the client itself, and stays in its reply.
    """

    text: bytes
    added: frozenset[Field]


def splice(route: Route, text: bytes) -> Spliced | None:
    """Ask for tokens in a request's body; None where that can't be done without side effects.

    None means that the request has to go on unchanged and gives no tokens: another protocol, a text
    that is not a JSON object, values that are for the model server to refuse.
    """
    if route not in ("chat", "completions"):
        return None
    try:
        return _splice(_Request(text), route)
    except (ValueError, RecursionError):
        return None


def _splice(asked: "_Request", route: Route) -> Spliced | None:
    if not all(asked.off(name) for name in _SPOILERS):
        return None
    added: set[Field] = set()
    if asked.off("return_token_ids"):
        asked.set("return_token_ids", b"true")
        added.add("return_token_ids")
    elif asked.get("return_token_ids") is not True:
        return None
    wanted = _chat_logprobs(asked) if route == "chat" else _completions_logprobs(asked)
    if wanted is None:
        return None
    if wanted:
        for name, value in wanted.items():
            asked.set(name, value)
        added.add("logprobs")
    return Spliced(asked.text(), frozenset(added))


class _Request:
    """The text of a request and the changes to it."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._members = jsontext.top_level(text)
        self._changes: list[tuple[int, int, bytes]] = []
        self._new: list[bytes] = []

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str) -> Any:
        member = self._members.get(name)
        return None if member is None else json.loads(self._text[member.value : member.end])

    def off(self, name: str) -> bool:
        value = self.get(name)
        return value is None or value is False

    def set(self, name: str, value: bytes) -> None:
        member = self._members.get(name)
        if member is None:
            self._new.append(b'"' + name.encode("ascii") + b'":' + value)
        else:
            # In place, since not every parser takes a repeated key.
            self._changes.append((member.value, member.end, value))

    def text(self) -> bytes:
        text = self._text
        for start, end, value in sorted(self._changes, reverse=True):
            text = text[:start] + value + text[end:]
        return jsontext.insert_members(text, b",".join(self._new)) if self._new else text


def _chat_logprobs(asked: _Request) -> dict[str, bytes] | None:
    """Return the fields to set so that vLLM reports log-probs; None: don't touch the request."""
    logprobs, top = asked.get("logprobs"), asked.get("top_logprobs")
    if logprobs is True and ("top_logprobs" not in asked or top is not None):
        return {}
    # What vLLM refuses without ``logprobs`` must not become a success.
    if asked.get("logprob_token_ids") or not (top is None or (type(top) is int and top == 0)):
        return None
    if not (asked.off("logprobs") or logprobs is True):
        return None
    return {"logprobs": b"true"} | ({"top_logprobs": b"0"} if "top_logprobs" in asked else {})


def _completions_logprobs(asked: _Request) -> dict[str, bytes] | None:
    logprobs = asked.get("logprobs")
    if logprobs is None:
        return None if asked.get("logprob_token_ids") else {"logprobs": b"0"}
    return {} if type(logprobs) is int else None
