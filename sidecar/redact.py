"""Removes credentials from what is recorded: header values and query parameters.

Decided by name, on the copy that is written; what goes to the model server is untouched. Patterns
over values are not used: they miss keys of unknown shape and damage text that looks like one.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_plus

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
# Of a name with this word, "tokens" are what a model counts.
_COUNTED = "ratelimit"
_URL_HEADERS = frozenset({"referer", "location", "content-location"})
_SEPARATOR = re.compile(r"[^a-z0-9]+")
_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_PARAMETER_NAME = re.compile(r"(?<=[?&;#])([^=?&;#\s]+)=")
_PARAMETER_VALUE = re.compile(r"[^&;#\s]*")


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Say whether a header or query parameter of this name holds a credential."""
    lower = name.lower()
    if lower in _HARMLESS:
        return False
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


def _header_value(name: str, value: str) -> str:
    if is_secret(name):
        return REDACTED
    return url(value) if "://" in value or name.lower() in _URL_HEADERS else value
