"""Texts that must not be shown, exported or trained, by pattern: ``daemon.redact``.

Shards keep bodies as they were sent. What is made from them is redacted where it is made: texts get
``REDACTED`` in place of what a pattern finds. Token ids can't be changed without becoming another
sample, so a call in whose texts a pattern finds something is left out of training as a whole.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from deploy.errors import UserError

REDACTED = "[REDACTED]"
LEFT_OUT = "text matches daemon.redact"


class Redactor:
    """Applies patterns; with none of them it changes and finds nothing."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """``patterns``: Python regular expressions.

        Raises:
            UserError: one is not a regular expression, or matches the empty text.
        """
        self._patterns = [_compiled(number, text) for number, text in enumerate(patterns, 1)]

    def redact(self, text: str) -> str:
        """Return the text with ``REDACTED`` in place of everything a pattern finds."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def finds(self, value: Any) -> bool:
        """Say whether a pattern finds something in any text of a value.

        ``value``: a text, or texts in lists, dictionaries (keys too) and ``msgspec`` structs.
        """
        if not self._patterns:
            return False
        texts = _texts(msgspec.to_builtins(value))
        return any(pattern.search(text) for text in texts for pattern in self._patterns)


def _compiled(number: int, text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(
            f"daemon.redact: pattern {number}, {text!r}, is not a regular expression: {error}"
        ) from None
    if pattern.search(""):
        raise UserError(f"daemon.redact: pattern {number}, {text!r}, matches everywhere")
    return pattern


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
