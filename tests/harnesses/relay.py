"""A TCP relay between a harness and the sidecar, to know when the harness hung up."""

import asyncio
import contextlib
import socket
import threading
import time


class Relay:
    """Relays to a local port in a thread of its own, byte for byte. ``port`` is its own."""

    def __init__(self, target: int) -> None:
        self.hung_up: list[float] = []
        """Monotonic times at which a client closed or reset its connection."""
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket))
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        there = asyncio.create_task(_pump(reader, up_writer))
        back = asyncio.create_task(_pump(up_reader, writer))
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        if there.done():
            self.hung_up.append(time.monotonic())
        for end in (writer, up_writer):
            end.transport.abort() if there.done() else end.close()
        await asyncio.wait({there, back})


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
