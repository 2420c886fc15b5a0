"""Fewer, larger sends: what is written to a connection in one turn of the event loop goes as one.

mitmproxy writes the head and every piece of a message by themselves, and a system call costs more
than all that the sidecar does in between.
"""

import asyncio


class JoiningWriter(asyncio.StreamWriter):
    """Takes a connection's writer's place. Sends at the end of the turn, when drained or closed."""

    def __init__(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        """``writer`` and ``reader`` are the connection's own."""
        loop = asyncio.get_running_loop()
        transport = writer.transport
        super().__init__(transport, transport.get_protocol(), reader, loop)
        self._own = writer  # asyncio closes the connection of a writer that nobody has any more.
        self._turns = loop
        self._pieces: list[bytes] = []
        self._held = False
        self._scheduled = False

    def hold(self) -> None:
        """Keep what has not been sent, and what is written now, until ``release``."""
        self._held = True

    def release(self) -> None:
        """Go on sending."""
        self._held = False
        self._schedule()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._pieces.append(bytes(data))
        self._schedule()

    def write_eof(self) -> None:
        self._send()
        super().write_eof()

    def close(self) -> None:
        self._send()
        super().close()

    async def drain(self) -> None:
        if not self._held:
            self._send()
        await super().drain()

    def _schedule(self) -> None:
        if not self._scheduled and self._pieces:
            self._scheduled = True
            self._turns.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._scheduled = False
        if not self._held:
            self._send()

    def _send(self) -> None:
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if not self.is_closing():
                super().write(data)
