"""What the sidecar logs to stderr: lines for people, or one JSON object per line for machines."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(log_format: LogFormat) -> None:
    """Log the sidecar's own lines from INFO on, and warnings of its libraries."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    root = logging.getLogger()
    for other in [other for other in root.handlers if isinstance(other, _Handler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("sidecar").setLevel(logging.INFO)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, among those of others."""


class JsonFormatter(logging.Formatter):
    """One object per line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``.

    ``exception`` (traceback) and ``stack`` come with it where a line has them.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)
