"""The token tap's wire format: the engine writes it, the sidecar cuts it out, the daemon reads it.

A sidecar asks for the tap with the request header ``x-ridealong-tap: <nonce>``; without it the
engine's replies are untouched. Every tap line is

    ``: <nonce> <JSON>\\n``

which in an SSE stream is a comment and so is legal even unstripped (WHATWG HTML, "Server-sent
events", section on interpreting an event stream). The nonce, new for every call, makes a line
unforgeable by the model's output.

* SSE replies carry the lines between events.
* Other replies carry them after the body; ``x-ridealong-tap-length`` then gives the number of bytes
  of the true body, and ``content-length`` the number with the lines.
* ``GET /ridealong/tap/<nonce>`` returns all lines of a call (``application/jsonl``, without the
  ``: <nonce> `` prefix) for a minute after its end: what a cancelled call had still produced when
  its connection was already gone.

Events, by ``"e"``:

``prompt``   ``{"e":"prompt","r":0,"id":"chatcmpl-…","ids":[…],"params":{…}}`` one per request
``tok``      ``{"e":"tok","r":0,"i":0,"ids":[…],"lp":[…],"v":"v3"}`` tokens and their version
``experts``  ``{"e":"experts","r":0,"i":0,"shape":[T,L,K],"dtype":"uint8","b64":"…"}`` routing
``end``      ``{"e":"end","r":0,"i":0,"n":12,"finish":"stop","cached":16}`` one per output
``error``    ``{"e":"error","r":0,"error":"…"}`` the tap itself failed: don't trust this call

``r`` numbers the engine requests of one HTTP call (a completions call may have several prompts),
``i`` the outputs of one request (``n > 1``).
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

HEADER = "x-ridealong-tap"
LENGTH_HEADER = "x-ridealong-tap-length"
PULL_PATH = "/ridealong/tap/"
NONCE = re.compile(r"[A-Za-z0-9]{8,64}")
UNKNOWN_VERSION = "unknown"
"""Weights without a name: while an update runs, or after one that did not end well."""


class TapError(ValueError):
    """The tap lines of a call contradict each other or can't be read."""


@dataclass
class EngineOutput:
    """One sampled output of one engine request.

    ``ids`` and ``logprobs`` have equal length; ``logprobs`` are natural logs of the sampled tokens
    under the distribution that was really sampled from (vLLM ``processed_logprobs``), NaN where the
    engine reported a non-finite value. ``versions[k]`` is the weight version of token ``k``.
    """

    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: str | None = None
    """``stop``, ``length``, ``repetition``, ``abort``, ``error``; None: no ``end`` arrived."""
    reported: int | None = None
    """The token count of the ``end`` event."""
    cached: int | None = None
    routed_experts: dict[str, Any] | None = None


@dataclass
class EngineRequest:
    """One request as the engine saw it. ``params`` are the sampling parameters really used."""

    index: int
    request_id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    outputs: dict[int, EngineOutput] = field(default_factory=dict)


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# A log-probability rounds to a hair above 0 at most, and has to be finite as float32.
_Logprob = Annotated[float, msgspec.Meta(ge=-3e38, le=1e-3)]
_Version = Annotated[str, msgspec.Meta(pattern=rf"^(v[0-9]{{1,9}}|{UNKNOWN_VERSION})\Z")]


class _Prompt(msgspec.Struct, tag_field="e", tag="prompt"):
    r: _Count
    id: str
    ids: list[_Count]
    params: dict[str, Any]


class _Tokens(msgspec.Struct, tag_field="e", tag="tok"):
    r: _Count
    i: _Count
    ids: list[_Count]
    lp: list[_Logprob | None]
    v: _Version


class _Experts(msgspec.Struct, tag_field="e", tag="experts"):
    r: _Count
    i: _Count
    shape: list[_Count]
    dtype: str
    b64: str


class _End(msgspec.Struct, tag_field="e", tag="end"):
    r: _Count
    i: _Count
    n: _Count
    finish: str | None
    cached: _Count | None = None


class _Error(msgspec.Struct, tag_field="e", tag="error"):
    error: str


_decoder = msgspec.json.Decoder(_Prompt | _Tokens | _Experts | _End | _Error)


def line(nonce: str, event: dict[str, Any]) -> bytes:
    """Encode one tap line. Non-finite floats become ``null`` (JSON has none)."""
    return b": " + nonce.encode("ascii") + b" " + msgspec.json.encode(event) + b"\n"


def decode(lines: list[str]) -> list[EngineRequest]:
    """Put the events of one call together, in order of ``r``.

    Raises:
        TapError: a line is not JSON or not an event of the right shape, an event precedes its
            prompt, a prompt or an end comes twice, or the tap reports that it failed.
    """
    requests: dict[int, EngineRequest] = {}
    for text in lines:
        try:
            event = _decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise TapError(f"unreadable tap line {text[:80]!r}: {error}") from error
        if isinstance(event, _Error):
            raise TapError(event.error)
        request = requests.get(event.r)
        if isinstance(event, _Prompt):
            if request is not None:
                raise TapError(f"two prompts of request {event.r}")
            requests[event.r] = EngineRequest(event.r, event.id, event.ids, event.params)
            continue
        if request is None:
            kind = type(event).__struct_config__.tag
            raise TapError(f"tap event {kind!r} of request {event.r} came before its prompt")
        output = request.outputs.get(event.i)
        if output is None:
            output = request.outputs[event.i] = EngineOutput(event.i)
        match event:
            case _Tokens():
                output.ids += event.ids
                output.logprobs += [float("nan") if p is None else p for p in event.lp]
                output.versions += [event.v] * len(event.ids)
            case _Experts():
                output.routed_experts = {
                    "shape": event.shape,
                    "dtype": event.dtype,
                    "b64": event.b64,
                }
            case _End():
                if output.reported is not None:
                    raise TapError(f"two ends of output {event.i} of request {event.r}")
                output.finish, output.reported = event.finish, event.n
                output.cached = event.cached
    return [requests[r] for r in sorted(requests)]
