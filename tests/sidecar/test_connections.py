"""What mitmproxy would keep of upstream connections as long as a client stays."""

import asyncio
from typing import Any

import pytest
from mitmproxy import http, options
from mitmproxy.addons.proxyserver import Proxyserver
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers.http import HttpClient, HttpLayer, HTTPMode
from mitmproxy.proxy.server import ConnectionIO

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


class FakeWriter:
    closed = False

    def close(self) -> None:
        self.closed = True


class FakeHandler:
    """A client's handler that has left a connection open, as mitmproxy's does in a race."""

    def __init__(self, **transports: ConnectionIO) -> None:
        self.transports = transports


async def _io(runs: bool) -> tuple[ConnectionIO, FakeWriter]:
    handler = asyncio.create_task(asyncio.sleep(60 if runs else 0))
    await asyncio.sleep(0.01)
    writer: Any = FakeWriter()
    return ConnectionIO(handler=handler, writer=writer), writer


async def test_what_a_handler_has_left_open_is_closed_when_the_client_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sidecar.proxy._LEFT_SECONDS", 0.05)
    client, _ = _http_layer()
    left, left_writer = await _io(runs=False)
    going_on, later_writer = await _io(runs=True)
    table: Any = Proxyserver()
    table.connections[client.id] = FakeHandler(client=left, upstream=going_on)
    _Connections(table).client_disconnected(client)
    assert left_writer.closed and not later_writer.closed
    assert going_on.handler is not None
    going_on.handler.cancel()
    await asyncio.sleep(0.2)
    assert later_writer.closed


def test_each_request_forgets_what_has_ended_before_it() -> None:
    client, layer = _http_layer()
    addon = _Connections(Proxyserver())
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
