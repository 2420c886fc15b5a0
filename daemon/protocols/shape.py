"""Reading JSON whose shape is not known to be right: what is not there is empty, what is wrong is
a ``ProtocolError``, and nothing else is ever raised."""

import json
from hashlib import sha256
from typing import Any

import msgspec


class ProtocolError(ValueError):
    """The bytes are not an exchange of the protocol they were recorded under."""


def decode(text: bytes | str) -> Any:
    """Parse JSON, and what servers and harnesses write beside it: NaN and infinities (log-probs),
    halves of surrogate pairs (text cut inside an emoji), which become U+FFFD.

    Raises:
        ProtocolError: it is not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as first:
        try:
            return _unicode(json.loads(text))
        except (ValueError, RecursionError):
            raise ProtocolError(f"not JSON: {first}") from first
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error


def _unicode(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_unicode(element) for element in value]
        case dict():
            return {_unicode(name): _unicode(element) for name, element in value.items()}
    return value


def encode(value: Any) -> str:
    """Write a JSON value, the same for equal values whatever the order of their keys.

    Raises:
        ProtocolError: it is nested too deeply.
    """
    try:
        return msgspec.json.encode(value, order="deterministic").decode()
    except RecursionError as error:
        raise ProtocolError(f"nested too deeply: {error}") from error


def digest(value: Any) -> str:
    """Return 16 hex characters that stand for a JSON value."""
    return sha256(encode(value).encode()).hexdigest()[:16]


def fields(value: Any, what: str = "value") -> dict[str, Any]:
    """Return a JSON object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"the {what} is not a JSON object")
    return value


def elements(value: Any, what: str = "value") -> list[Any]:
    """Return a JSON array; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProtocolError(f"the {what} is not a JSON array")
    return value


def string(value: Any) -> str:
    """Return a string; null is empty, other values stand as their JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else encode(value)


def optional(value: Any) -> str | None:
    """Return a string, or None for null, an empty string and any other value."""
    return value if isinstance(value, str) and value else None


def count(value: Any) -> int | None:
    """Return a number of tokens or an index, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
