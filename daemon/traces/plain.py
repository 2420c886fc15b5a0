"""What others wrote, made harmless: text for a terminal, and times that no calendar has.

Text can't move the cursor, set the title or colour a line then.
"""

from datetime import datetime, tzinfo

# Each by one character, so that styles stay where they are: C0 and DEL by their pictures (Unicode
# block "Control Pictures"), C1 by the replacement character.
_VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def visible(text: str) -> str:
    """Return a text with its control characters, but for tabs and newlines, as visible ones."""
    return text.translate(_VISIBLE)


def moment(seconds: float, zone: tzinfo | None = None) -> datetime | None:
    """Return Unix time as a date, local unless ``zone`` is given; None if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, zone)
    except (OverflowError, ValueError, OSError):
        return None
