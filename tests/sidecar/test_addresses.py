import asyncio
import socket

import pytest

from deploy.errors import UserError
from sidecar.routing.addresses import (
    Address,
    bind,
    inherited_socket,
    parse_loopback,
    parse_upstream,
)


@pytest.mark.parametrize(
    ("text", "url", "origin"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://h/", "http://h:80", "http://h:80"),
        ("https://h/team/a/", "https://h:443/team/a", "https://h:443"),
        ("http://[::1]:9", "http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_upstream(text, url, origin):
    upstream = parse_upstream(text)
    assert (upstream.url, upstream.origin) == (url, origin)


@pytest.mark.parametrize(
    "text", ["", "h:8000", "ftp://h", "http://", "http://h:x", "http://h?x=1", "http://u:p@h"]
)
def test_a_wrong_upstream_says_what_to_do(text):
    with pytest.raises(UserError) as error:
        parse_upstream(text)
    assert "\n" not in str(error.value)
    assert "u:p" not in str(error.value)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.9.9.9:0"])
def test_loopback(text):
    assert parse_loopback("k", text).port in (0, 1)


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "8787", "127.0.0.1", "", "h:1/x"]
)
def test_anything_but_loopback_is_refused(text):
    with pytest.raises(UserError, match=r"sidecar\.listen"):
        parse_loopback("sidecar.listen", text)


def test_an_occupied_port_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="in use") as error:
            bind("sidecar.listen", Address(*taken.getsockname()))
    assert "\n" not in str(error.value)


async def test_small_pieces_of_a_reply_do_not_wait_for_acknowledgements():
    async def look(reader, writer):
        accepted = writer.get_extra_info("socket")
        writer.write(b"%d" % accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = bind("sidecar.listen", Address("127.0.0.1", 0))
    async with await asyncio.start_server(look, sock=listening):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(reader.read(), 10) == b"1"
        writer.close()


def test_no_socket_is_inherited_for_another_process(monkeypatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", "1")
    assert inherited_socket() is None
    assert inherited_socket() is None, "the variables are gone"
