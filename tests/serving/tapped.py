"""A client that asks for the tap and takes a reply apart, as the sidecar would."""

import secrets
from dataclasses import dataclass
from typing import Any

import httpx

from tokenization.tap import wire


@dataclass
class TappedReply:
    status: int
    headers: httpx.Headers
    body: bytes
    """The reply without the tap's lines."""
    lines: list[str]
    """The tap's JSON events."""
    nonce: str

    def requests(self) -> list[wire.EngineRequest]:
        return wire.decode(self.lines)

    def output(self) -> wire.EngineOutput:
        (request,) = self.requests()
        (output,) = request.outputs.values()
        return output


def tapped_post(url: str, path: str, body: dict[str, Any]) -> TappedReply:
    nonce = secrets.token_hex(8)
    reply = httpx.post(url + path, json=body, headers={wire.HEADER: nonce}, timeout=120)
    return take_apart(reply, nonce)


def take_apart(reply: httpx.Response, nonce: str) -> TappedReply:
    if wire.LENGTH_HEADER in reply.headers:
        length = int(reply.headers[wire.LENGTH_HEADER])
        clean, extra = reply.content[:length], reply.content[length:]
        rest, lines = cut(extra, nonce)
        assert rest == b"", "only tap lines may follow the body"
    else:
        clean, lines = cut(reply.content, nonce)
    return TappedReply(reply.status_code, reply.headers, clean, lines, nonce)


def cut(stream: bytes, nonce: str) -> tuple[bytes, list[str]]:
    prefix = f": {nonce} ".encode()
    clean, lines = b"", []
    for line in stream.splitlines(keepends=True):
        if line.startswith(prefix):
            lines.append(line[len(prefix) :].decode().rstrip("\n"))
        else:
            clean += line
    return clean, lines
