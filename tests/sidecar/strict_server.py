"""An upstream that keeps every byte it gets, and says which requests are in them."""

import re
import socket
import threading

import h11


class StrictServer:
    """Answers each whole request with ``ok <number>``; ``seen`` are (method, target, body)."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes, bytes]] = []
        self.raw: list[bytearray] = []
        """All bytes, by connection."""
        self.errors: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        self.seen, self.raw, self.errors = [], [], []

    def heads(self) -> list[bytes]:
        """Return whatever looks like the begin of a request, wherever it stands."""
        return [m for raw in self.raw for m in re.findall(rb"(?m)^\S+ \S+ HTTP/", bytes(raw))]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        raw = bytearray()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        request, body = None, b""
        with connection:
            while True:
                try:
                    event = http.next_event()
                except h11.RemoteProtocolError as error:
                    self.errors.append(str(error))
                    return
                if event is h11.NEED_DATA:
                    try:
                        data = connection.recv(65536)
                    except OSError:
                        return
                    if data and not raw:
                        self.raw.append(raw)
                    raw += data
                    http.receive_data(data)
                elif isinstance(event, h11.Request):
                    request, body = event, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert request is not None
                    if request.target != b"/ridealong/engine":
                        self.seen.append((request.method, request.target, body))
                    text = b"ok %d" % len(self.seen)
                    reply = h11.Response(
                        status_code=200, headers=[("content-length", str(len(text)))]
                    )
                    out = http.send(reply) + http.send(h11.Data(data=text))
                    connection.sendall(out + http.send(h11.EndOfMessage()))
                    if http.our_state is h11.MUST_CLOSE:
                        return
                    http.start_next_cycle()
                else:
                    return
