"""Removes credentials from what is recorded: header values, query parameters, error texts.

Decided by name, on the copy that is written; what goes to the model server is untouched. Patterns
over values are not used: they miss keys of unknown shape and damage text that looks like one. What
a name has shown to be a credential is also removed where it is repeated (``Secrets``).
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from urllib.parse import parse_qsl, quote, unquote_plus

REDACTED = "REDACTED"

# One of the words of the name, which hyphens and the like separate, is such a word or ends so; a
# plural or a number at its end makes no difference. Words are also run together ("apikey",
# "accesstoken"), hence endings; a harmless "monkey" is the price.
_SECRET_WORD = re.compile(
    "(?:pass|pwd|sig|.*(?:auth|authorization|authentication|bearer|cookie|credential|jwt|key"
    "|passphrase|passwd|password|secret|signature|token))s?[0-9]*"
)
# "Key" here is the key of a retry, not of a door: what tells a retried call from a new one.
_HARMLESS = frozenset({"idempotency-key", "x-idempotency-key"})
# Their names don't say it: browsers' WebSockets carry API keys in the one, RFC 9449 proofs are the
# other.
_SECRET_NAMES = frozenset({"sec-websocket-protocol", "dpop"})
# Of a name with this word, "tokens" are what a model counts.
_COUNTED = "ratelimit"
_URL_HEADERS = frozenset({"referer", "location", "content-location"})
_SEPARATOR = re.compile(r"[^a-z0-9]+")
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_PARAMETER_NAME = re.compile(r"(?<=[?&;#])([^=?&;#\s]+)=")
_PARAMETER_VALUE = re.compile(r"[^&;#\s]*")
# How Python shows bytes, which in an error text are what a peer has sent.
_BYTES = re.compile(r"\bb(?:'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?)", re.DOTALL)
# Shorter ones ("none", "EMPTY", "realtime") would be found in words that are none.
_LEAST_SECRET = 12


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Say whether a header or query parameter of this name holds a credential."""
    lower = name.lower()
    if lower in _HARMLESS:
        return False
    if lower in _SECRET_NAMES:
        return True
    words = _SEPARATOR.split(lower)
    return _COUNTED not in words and any(map(_SECRET_WORD.fullmatch, words))


def headers(fields: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the header fields, in order, with the values of secret ones replaced."""
    return [(name, _header_value(name, value)) for name, value in fields]


def url(text: str) -> str:
    """Return a URL, request target or text with URLs in it, without the credentials in those.

    Replaced are user names with passwords, and the values of secret parameters in query and
    fragment, also of a URL that is itself a parameter. Everything else stays as it is spelled.
    """
    text = _USERINFO.sub(f"{REDACTED}@", text)
    kept, position = [], 0
    while found := _PARAMETER_NAME.search(text, position):
        kept.append(text[position : found.end()])
        position = found.end()
        if is_secret(unquote_plus(found[1])):
            kept.append(REDACTED)
            value = _PARAMETER_VALUE.match(text, position)
            position = value.end() if value else position
    return "".join(kept) + text[position:]


def message(text: str) -> str:
    """Return an error text without URLs' credentials and without bytes that it quotes."""
    return url(_BYTES.sub("b'...'", text))


class Secrets:
    """The values of the credentials in one exchange, wherever they turn up again.

    A proxy or server may copy a key into a header of another name, into a path or into the text of
    an error.
    """

    def __init__(self, fields: Iterable[tuple[str, str]], target: str) -> None:
        """``fields``: header fields of request and reply; ``target``: the request's."""
        found = {part for name, value in fields if is_secret(name) for part in _parts(name, value)}
        query = target.partition("?")[2]
        for name, value in parse_qsl(query, keep_blank_values=True, separator="&"):
            if is_secret(name):
                found |= {value, quote(value, safe="")}
        # The longest first: one may begin another.
        self._values = sorted(
            (v for v in found if len(v) >= _LEAST_SECRET and not v.startswith("/")),
            key=len,
            reverse=True,
        )

    def remove(self, text: str) -> str:
        """Return the text without them."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return text

    def remove_bytes(self, data: bytes) -> bytes:
        """Return the bytes without them."""
        for value in self._values:
            data = data.replace(value.encode("latin-1", "replace"), REDACTED.encode())
        return data


def _parts(name: str, value: str) -> Iterator[str]:
    """Yield what is secret in a header value: of ``Bearer x`` the x, of cookies their values."""
    pieces = re.split(r"[;,\s]+", value)
    # What follows in a Set-Cookie says where the cookie is valid.
    for piece in pieces[:1] if name.lower() == "set-cookie" else pieces:
        yield piece.strip('"')
        yield piece.partition("=")[2].strip('"')


def _header_value(name: str, value: str) -> str:
    if is_secret(name):
        return REDACTED
    return url(value) if "://" in value or name.lower() in _URL_HEADERS else value
