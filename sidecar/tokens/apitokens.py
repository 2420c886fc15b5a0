"""Takes the tokens that ``sidecar.tokens.splice`` asked for out of a stock vLLM's reply. Pure.

Cutters as in ``sidecar.tokens.strip``: what they return is, byte for byte, what vLLM sends to a
client that did not ask. vLLM names its token fields in every reply and makes them ``null`` where
nobody asked (``entrypoints/openai/{chat_completion,completion}/protocol.py``), so a value is taken
out by writing ``null`` in its place. A stream has events that are there for their ids alone, while
a tool or reasoning parser has nothing to say yet (an empty delta); they go as a whole. What was
taken out collects in ``lines``: one JSON object for each event, or one for the body of a reply that
is no stream, made of the reply's own text, for example
``{"id":"chatcmpl-…","choices":[{"index":0,"token_ids":[9707],"logprobs":{…}}]}`` An event that
can't be read goes on unchanged, and a line ``{"error":"…"}`` marks the call.
``tokenization.apisource`` reads the lines.
"""

import json
import re
from collections.abc import Collection

import msgspec

from sidecar.bodies import jsontext
from sidecar.bodies.jsontext import Member
from sidecar.tokens.splice import Field

_KEPT_OF_REPLY = ("id", "prompt_token_ids")
_KEPT_OF_CHOICE = ("index", "finish_reason", "prompt_token_ids", "token_ids", "logprobs")
_OURS: dict[str, Field] = {
    "prompt_token_ids": "return_token_ids",
    "token_ids": "return_token_ids",
    "logprobs": "logprobs",
}
_NULL = {key: b'"%b":null' % key.encode() for key in (*_OURS, "finish_reason")}
_DONE = b"[DONE]"
_DATA = b"data:"
_line_end = re.compile(rb"\r\n|\n|\r")
_empty = re.compile(rb"\{[ \t\n\r]*\}")
_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
_NATURAL = rb"(?:0|[1-9][0-9]*+)"
_NATURALS = rb"\[(?:%b(?:,%b)*+)?\]" % (_NATURAL, _NATURAL)
_NUMBER = rb"-?%b(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?" % _NATURAL
_LOGPROB = rb'\{"token":%b,"logprob":%b,"bytes":(?:null|%b),"top_logprobs":\[\]\}' % (
    _STRING,
    _NUMBER,
    _NATURALS,
)
# A token of a chat's stream: nearly all events are. ``_cut_compact`` reads the rest.
_token = re.compile(
    rb'data: \{("id":%b),"object":%b,"created":%b,"model":%b,' % (*[_STRING] * 2, _NATURAL, _STRING)
    + rb'"choices":\[\{("index":%b),"delta":\{%b:%b\},' % (_NATURAL, _STRING, _STRING)
    + rb'(?P<logprobs>"logprobs":(?:null|\{"content":\[%b(?:,%b)*+\]\})),' % (_LOGPROB, _LOGPROB)
    + rb'("finish_reason":null),(?P<ids>"token_ids":(?:null|%b))\}\]\}\n\n' % _NATURALS
)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class SseCutter:
    """Server-sent events, in lines ended by LF, CRLF or CR; holds back a data line until it ends.

    The framing is that of the WHATWG HTML standard, section "Server-sent events". vLLM writes an
    event's data as one line.
    """

    def __init__(self, added: Collection[Field]) -> None:
        """``added``: the fields of the request that the client had not asked for."""
        self.lines: list[str] = []
        self._added = added
        self._line = bytearray()
        self._passing = False
        """The current line is no data line: its bytes go on as they come."""
        self._after_cr = False
        """The last byte was a CR; an LF that comes next belongs to it."""
        self._end_passed = True
        """The end of the last line went on."""
        self._event_begins = True
        self._dropping = False
        """The last line was an event's data and has been dropped; its blank line has to go too."""

    @property
    def held(self) -> bytes:
        """What was fed, belongs to the reply and has not been returned yet."""
        return bytes(self._line)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the reply; return those that can go on now."""
        if self._event_begins and not self._line and not self._passing and not self._after_cr:
            token = _token.fullmatch(data)
            if token is not None and _is_utf8(data):
                self._end_passed = True
                return self._without(token)
        passed = bytearray()
        position = 0
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                passed += b"\n" if self._end_passed else b""
                position = 1
        while position < len(data):
            end = _line_end.search(data, position)
            if end is None:
                self._part(data[position:], passed)
                break
            self._part(data[position : end.start()], passed)
            self._end_line(end[0], passed)
            position = end.end()
            if end[0] == b"\r" and position == len(data):
                self._after_cr = True
        return bytes(passed)

    def finish(self) -> bytes:
        """End of the reply: return what was still held back."""
        held = self.held
        self._line.clear()
        return held

    def _without(self, token: re.Match[bytes]) -> bytes:
        """Take the tokens out of an event that came alone and whole."""
        id_, index, logprobs, finish, ids = token.groups()
        line = b'{%b,"choices":[{%b,%b,%b,%b}]}' % (id_, index, finish, ids, logprobs)
        self.lines.append(line.decode())
        data = token.string
        if "logprobs" in self._added:
            logprobs = _NULL["logprobs"]
        if "return_token_ids" in self._added:
            ids = _NULL["token_ids"]
        before, after = data[: token.start("logprobs")], data[token.end("ids") :]
        return b"%b%b,%b,%b%b" % (before, logprobs, finish, ids, after)

    def _part(self, part: bytes, passed: bytearray) -> None:
        if self._passing:
            passed += part
            return
        self._line += part
        if not (self._line.startswith(_DATA) or _DATA.startswith(self._line)):
            self._pass_line(passed)
            self._passing = True

    def _pass_line(self, passed: bytearray) -> None:
        passed += self._line
        self._line.clear()

    def _end_line(self, terminator: bytes, passed: bytearray) -> None:
        blank = not self._passing and not self._line
        dropped_data = self._line.startswith(_DATA) and self._drops()
        self._end_passed = not (dropped_data or (blank and self._dropping))
        if self._end_passed:
            self._pass_line(passed)
            passed += terminator
        self._dropping = dropped_data
        self._event_begins = blank
        self._passing = False

    def _drops(self) -> bool:
        """Take the tokens out of the data line; say whether nothing of its event remains."""
        start = len(_DATA) + self._line.startswith(_DATA + b" ")
        payload = bytes(self._line[start:])
        if not payload or payload == _DONE:
            return False
        try:
            cut = _cut(payload, self._added)
        except ValueError as error:
            self.lines.append(_unreadable(error))
            return False
        if cut.line:
            self.lines.append(cut.line)
        self._line[start:] = cut.text
        if cut.ours and self._event_begins:
            self._line.clear()
            return True
        return False


class BodyCutter:
    """The JSON body of a reply that is no stream: held back whole, since its length changes."""

    def __init__(self, added: Collection[Field]) -> None:
        """``added``: the fields of the request that the client had not asked for."""
        self.lines: list[str] = []
        self._added = added
        self._body = bytearray()

    @property
    def held(self) -> bytes:
        """What was fed, belongs to the reply and has not been returned yet."""
        return bytes(self._body)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the reply; none can go on yet."""
        self._body += data
        return b""

    def finish(self) -> bytes:
        """End of the reply: return its body, without the tokens."""
        body = self.held
        self._body.clear()
        try:
            cut = _cut(body, self._added)
        except ValueError as error:
            self.lines.append(_unreadable(error))
            return body
        if cut.line:
            self.lines.append(cut.line)
        return cut.text


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Cut:
    """A JSON text with its tokens taken out."""

    def __init__(self, text: bytes, line: str, ours: bool) -> None:
        self.text = text
        self.line = line
        """What was found, empty where there was nothing."""
        self.ours = ours
        """Without our fields vLLM would not have sent this event."""


def _cut(text: bytes, added: Collection[Field]) -> _Cut:
    """Take the token fields out of a reply's JSON object or out of that of one event.

    Raises:
        ValueError: the text is not a JSON object, or not shaped like a reply.
    """
    return _cut_compact(text, added) or _cut_any(text, added)


def _cut_compact(text: bytes, added: Collection[Field]) -> _Cut | None:
    """Do as ``_cut_any``, many times faster, for text spelled as vLLM does; None for any other.

    Without blanks, repeated keys and escapes in keys an object is its members joined, which the
    comparisons make sure of.
    """
    try:
        text.decode()
        found = _object.decode(text)
        listed = found.get("choices")
        choices = [] if listed is None else [_spelled(one) for one in _objects.decode(listed)]
    except (ValueError, RecursionError, msgspec.DecodeError):
        return None
    reply = _spelled(found)
    if _joined(reply) != text or (listed is not None and _list(choices) != reply["choices"]):
        return None
    if not choices and reply.get("prompt_token_ids") in (None, _NULL["prompt_token_ids"]):
        return _Cut(text, "", False)
    kept = [reply[key] for key in _KEPT_OF_REPLY if key in reply]
    lines = [
        b"{%b}" % b",".join([choice[key] for key in _KEPT_OF_CHOICE if key in choice])
        for choice in choices
    ]
    kept.append(b'"choices":[' + b",".join(lines) + b"]")
    ours = (
        "return_token_ids" in added
        and len(choices) == 1
        and _empty.fullmatch(choices[0].get("delta", b""), len(b'"delta":')) is not None
        and choices[0].get("finish_reason") in (None, _NULL["finish_reason"])
        and choices[0].get("token_ids") not in (None, _NULL["token_ids"])
    )
    for key, field in _OURS.items():
        if field in added:
            for holder in (reply, *choices) if key == "prompt_token_ids" else choices:
                if key in holder:
                    holder[key] = _NULL[key]
    if listed is not None:
        reply["choices"] = _list(choices)
    return _Cut(_joined(reply), (b"{" + b",".join(kept) + b"}").decode(), ours)


def _spelled(values: dict[str, msgspec.Raw]) -> dict[str, bytes]:
    """Return an object's members, each with its key."""
    return {key: b'"%b":%b' % (key.encode(), values[key]) for key in values}


def _joined(members: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(members.values())


def _list(choices: list[dict[str, bytes]]) -> bytes:
    return b'"choices":[%b]' % b",".join(map(_joined, choices))


def _cut_any(text: bytes, added: Collection[Field]) -> _Cut:
    """Do as ``_cut``, however the text is spelled."""
    reply = jsontext.top_level(text)
    kept = [text[reply[key].start : reply[key].end] for key in _KEPT_OF_REPLY if key in reply]
    found = [reply["prompt_token_ids"]] if _has_value(text, reply, "prompt_token_ids") else []
    choices = []
    ours = False
    if "choices" in reply:
        spans = list(jsontext.elements(text, reply["choices"].value))
        for start, _ in spans:
            choice = {member.key: member for member in jsontext.members(text, start)}
            choices.append(
                b",".join(
                    text[choice[key].start : choice[key].end]
                    for key in _KEPT_OF_CHOICE
                    if key in choice
                )
            )
            found += [choice[key] for key in _OURS if _has_value(text, choice, key)]
            ours = len(spans) == 1 and _is_empty_delta(text, choice)
    if not found and not choices:
        return _Cut(text, "", False)
    for member in sorted(found, key=lambda member: member.value, reverse=True):
        if _OURS[member.key] in added:
            text = text[: member.value] + b"null" + text[member.end :]
    kept.append(b'"choices":[' + b",".join(b"{" + choice + b"}" for choice in choices) + b"]")
    line = (b"{" + b",".join(kept) + b"}").decode()
    return _Cut(text, line, ours and "return_token_ids" in added)


def _has_value(text: bytes, of: dict[str, Member], key: str) -> bool:
    return key in of and text[of[key].value : of[key].end] != b"null"


def _is_empty_delta(text: bytes, choice: dict[str, Member]) -> bool:
    delta = choice.get("delta")
    return (
        delta is not None
        and _empty.fullmatch(text, delta.value, delta.end) is not None
        and not _has_value(text, choice, "finish_reason")
        and _has_value(text, choice, "token_ids")
    )


def _unreadable(error: ValueError) -> str:
    return json.dumps({"error": f"a reply's tokens can't be read: {error}"})
