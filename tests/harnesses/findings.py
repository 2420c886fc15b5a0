"""The table of harness × property: filled by the suite's tests, written to docs/harnesses.md."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

NOT_SENT = "not sent by this harness"

_INTRODUCTION = """# Harnesses

What the suite of real programs found, each installed from its registry and unmodified, with a
scripted model behind a real sidecar. Written by `make test-harnesses`; a cell that is empty was not
tried with that harness.

- **tool round trip**: model calls of one task with one tool call, all recorded under the run of the
  `/r/<run>` prefix.
- **session**, **agent**: ids of the harness's own that were found in every call.
- **429**, **500**, **reset**, **break**: the first call was answered so (`reset`: before the
  headers; `break`: in the middle of the stream). All of these attempts were recorded as failed;
  "retried" means that the harness tried again and that the call was marked as that retry, by the
  same request (*same*) or by one that goes on from the broken half (*continued*).
- **SIGINT**: milliseconds from the signal to the upstream's connection being closed, and in
  brackets the part after the harness had hung up, which is the sidecar's. The suite's limit is 250.
- **subagents**: what told their calls from those of the agent they work for.
- **side calls**: the kinds that were provoked, recognised and kept out of training.
"""


class Findings:
    """Collects cells; a row or column that is not known raises KeyError at once."""

    def __init__(self, rows: Mapping[str, str], columns: Sequence[str]) -> None:
        """``rows`` maps a harness to its version, ``columns`` are the properties."""
        self._rows = dict(rows)
        self._columns = list(columns)
        self._cells: dict[str, dict[str, str]] = defaultdict(dict)

    def note(self, row: str, column: str, cell: str) -> None:
        """Fill a cell, or add to it."""
        if row not in self._rows or column not in self._columns:
            raise KeyError(f"no cell {row!r} × {column!r}")
        cells = self._cells[row]
        cells[column] = f"{cells[column]}; {cell}" if column in cells else cell

    def complete(self, columns: Sequence[str]) -> bool:
        """Whether every row has a cell in each of ``columns``."""
        return all(column in self._cells[row] for row in self._rows for column in columns)

    def write(self, path: Path) -> None:
        """Write the table as Markdown."""
        lines = [_INTRODUCTION, _line(["harness", "version", *self._columns])]
        lines.append(_line(["---"] * (2 + len(self._columns))))
        for row, version in self._rows.items():
            cells = [self._cells[row].get(column, "") for column in self._columns]
            lines.append(_line([row, version, *cells]))
        path.write_text("\n".join(lines) + "\n")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
