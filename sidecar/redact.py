"""Removes credentials from what is recorded: header values and query parameters.

Decided by name, on the copy that is written; what goes to the model server is untouched. Patterns
over values are not used: they miss keys of unknown shape and damage text that looks like one.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_plus

REDACTED = "REDACTED"

# One of the words of the name, which hyphens and the like separate, ends so. Words are also run
# together ("apikey", "accesstoken"), hence endings; a harmless "monkey" is the price.
_SECRET_ENDINGS = (
    "auth",
    "authorization",
    "authentication",
    "cookie",
    "credential",
    "credentials",
    "jwt",
    "key",
    "passwd",
    "password",
    "secret",
    "signature",
    "token",
)
# "Key" here is the key of a retry, not of a door: what tells a retried call from a new one.
_HARMLESS = frozenset({"idempotency-key", "x-idempotency-key"})
_URL_HEADERS = frozenset({"referer", "location", "content-location"})
_SEPARATOR = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Say whether a header or query parameter of this name holds a credential."""
    lower = name.lower()
    if lower in _HARMLESS:
        return False
    return any(word.endswith(_SECRET_ENDINGS) for word in _SEPARATOR.split(lower))


def headers(fields: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the header fields, in order, with the values of secret ones replaced."""
    return [(name, _header_value(name, value)) for name, value in fields]


def url(text: str) -> str:
    """Return a URL or request target with the values of secret query parameters replaced.

    Everything else stays as it is spelled.
    """
    head, mark, tail = text.partition("?")
    if not mark:
        return text
    query, hash_mark, fragment = tail.partition("#")
    return head + mark + re.sub(r"[^&;]+", _parameter, query) + hash_mark + fragment


def _header_value(name: str, value: str) -> str:
    if is_secret(name):
        return REDACTED
    return url(value) if name.lower() in _URL_HEADERS else value


def _parameter(match: re.Match[str]) -> str:
    name, equals, _ = match[0].partition("=")
    return f"{name}={REDACTED}" if equals and is_secret(unquote_plus(name)) else match[0]
