"""What mitmproxy would keep of upstream connections as long as a client stays."""

from mitmproxy import options
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import HttpClient, HttpLayer, HTTPMode

from sidecar.proxy import forget_closed


def _server(port: int, state: ConnectionState, ended: float | None, error: str | None) -> Server:
    server = Server(address=("127.0.0.1", port))
    server.state, server.timestamp_end, server.error = state, ended, error
    return server


def test_only_connections_that_have_ended_are_forgotten() -> None:
    client = Client(peername=("127.0.0.1", 1), sockname=("127.0.0.1", 2), timestamp_start=0)
    layer = HttpLayer(Context(client, options.Options()), HTTPMode.regular)
    closed, waiting, failed, is_open, half = (
        _server(1, ConnectionState.CLOSED, 5.0, None),
        _server(2, ConnectionState.CLOSED, None, None),
        _server(3, ConnectionState.CLOSED, None, "refused"),
        _server(4, ConnectionState.OPEN, None, None),
        _server(5, ConnectionState.CAN_WRITE, None, None),
    )
    for server in (closed, waiting, failed, is_open, half):
        layer.connections[server] = HttpClient(layer.context.fork())
    layer.connections[client] = HttpClient(layer.context.fork())
    forget_closed(layer)
    assert set(layer.connections) == {client, waiting, failed, is_open, half}
