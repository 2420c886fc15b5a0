"""A program at a pseudo-terminal, for harnesses that do more for a person than for a script."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harnesses.bench import end_group, until

ROWS, COLUMNS = 40, 120


class Terminal:
    """Starts a program on construction; ``shown`` is all that it has written so far."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.shown = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            argv,
            env={**env, "TERM": "xterm-256color"},
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        threading.Thread(target=self._read, daemon=True).start()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def await_text(self, text: str) -> None:
        until(lambda: text.encode() in self.shown, f"{text!r} on the terminal")

    def close(self) -> None:
        end_group(self.process)
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.shown += data
