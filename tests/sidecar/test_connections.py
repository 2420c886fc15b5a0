"""What mitmproxy would keep of upstream connections as long as a client stays."""

from mitmproxy import http, options
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers.http import HttpClient, HttpLayer, HTTPMode

from sidecar.proxy import _Connections, forget_closed


def _server(port: int, state: ConnectionState, ended: float | None, error: str | None) -> Server:
    server = Server(address=("127.0.0.1", port))
    server.state, server.timestamp_end, server.error = state, ended, error
    return server


def _http_layer() -> tuple[Client, HttpLayer]:
    client = Client(peername=("127.0.0.1", 1), sockname=("127.0.0.1", 2), timestamp_start=0)
    return client, HttpLayer(Context(client, options.Options()), HTTPMode.regular)


def test_only_connections_that_have_ended_are_forgotten() -> None:
    client, layer = _http_layer()
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


def test_each_request_forgets_what_has_ended_before_it() -> None:
    client, layer = _http_layer()
    addon = _Connections()
    choice = NextLayer(layer.context)
    choice.layer = layer
    addon.next_layer(choice)
    for port in (1, 2):
        ended = _server(port, ConnectionState.CLOSED, 5.0, None)
        layer.connections[ended] = HttpClient(layer.context.fork())
        addon.requestheaders(http.HTTPFlow(client, ended))
        assert ended not in layer.connections
    addon.client_disconnected(client)
    later = _server(3, ConnectionState.CLOSED, 5.0, None)
    layer.connections[later] = HttpClient(layer.context.fork())
    addon.requestheaders(http.HTTPFlow(client, later))
    assert later in layer.connections
