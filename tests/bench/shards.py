"""What trace shards take: bytes per generated token beside other ways to store the same records,
and megabytes of raw traffic per second and core, written and read.

    python -m tests.bench.shards [--json FILE]

The records are those of a coding agent's run of 50 turns that grows to about 32k tokens of context:
every turn sends the whole conversation, the model answers with a few hundred tokens (streamed, with
the token tap's lines), and the tool's result is a piece of a Python source file. Two spellings of
the same run are measured: one that appends to its messages, and one that sends its tools last and
marks its latest message, and takes the mark off the one before, as Claude Code does.
"""

import argparse
import ast
import gzip
import json
import platform
import random
import re
import struct
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zstandard

from sidecar.traces.history import History
from sidecar.traces.reader import read_records
from sidecar.traces.record import Body, Exchange, Request, Response, Session, encode, weight
from sidecar.traces.shards import ShardEncoder, end_mark

TURNS = 50

_WORD = re.compile(r"\w{1,6}|\s+|[^\w\s]")


@dataclass(frozen=True)
class Shape:
    """A run, in tokens: system prompt, reply and tool result of a turn."""

    turns: int
    system: int = 3000
    reply: int = 200
    result: int = 380
    tools: int = 12


class Source:
    """Text as agents read it: the standard library's own, cut to a number of tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        folder = Path(sysconfig.get_paths()["stdlib"])
        self._files = sorted(p for p in folder.glob("*.py") if p.stat().st_size > 20_000)
        self._open: dict[Path, list[str]] = {}

    def take(self, tokens: int) -> list[str]:
        """Return the next words of a random place of a random file."""
        path = self._random.choice(self._files)
        if path not in self._open:
            self._open[path] = _WORD.findall(path.read_text(errors="replace"))
        words = self._open[path]
        start = self._random.randrange(len(words) - tokens) if len(words) > tokens else 0
        return words[start : start + tokens]

    def prose(self, tokens: int) -> list[str]:
        """Return words of docstrings, as a model's reply or a system prompt has them."""
        words: list[str] = []
        while len(words) < tokens:
            path = self._random.choice(self._files)
            words += self._random.choice(_docstrings(path))
        return words[:tokens]


@cache
def _docstrings(path: Path) -> list[list[str]]:
    tree = ast.parse(path.read_text(errors="replace"))
    found = [ast.get_docstring(node) for node in ast.walk(tree) if _documented(node)]
    return [_WORD.findall(text) for text in found if text] or [["none"]]


def _documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


def run(seed: int, shape: Shape, *, rewritten: bool = False) -> Iterator[Exchange]:
    """Yield the calls of one run.

    ``rewritten``: the mark on the latest message moves from turn to turn, the tools come last.
    """
    source, generator = Source(seed), random.Random(seed)
    ids = _Vocabulary()
    system = source.prose(shape.system)
    tools = [
        {
            "name": f"tool_{k}",
            "description": "".join(source.prose(120)),
            "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
        }
        for k in range(shape.tools)
    ]
    context = system + _WORD.findall(json.dumps(tools)) + source.prose(60)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "".join(context[-60:])}]}
    ]
    for turn in range(shape.turns):
        reply = source.prose(shape.reply)
        sent = [dict(message) for message in messages]
        if rewritten:
            last = sent[-1]["content"][-1] | {"cache_control": {"type": "ephemeral"}}
            sent[-1]["content"] = [*sent[-1]["content"][:-1], last]
        body: dict[str, Any] = {"model": "model", "max_tokens": 32000, "stream": True}
        parts = {"messages": sent, "system": "".join(system), "tools": tools}
        order = ("messages", "system", "tools") if rewritten else ("system", "tools", "messages")
        body |= {name: parts[name] for name in order}
        yield _call(generator, seed, turn, body, ids.of(context), reply, ids.of(reply))
        result = source.take(shape.result)
        text = "".join(reply)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        use = {"type": "tool_result", "tool_use_id": f"toolu_{generator.getrandbits(96):024x}"}
        messages.append({"role": "user", "content": [use | {"content": "".join(result)}]})
        context = context + reply + result


class _Vocabulary:
    """Token ids: words that come early and often have small ones, as in a real vocabulary."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def of(self, words: list[str]) -> list[int]:
        return [self._ids.setdefault(word, 11 + 7 * len(self._ids)) for word in words]


def _call(
    generator: random.Random,
    seed: int,
    turn: int,
    body: dict[str, Any],
    prompt: list[int],
    reply: list[str],
    sampled: list[int],
) -> Exchange:
    call = f"chatcmpl-{generator.getrandbits(128):032x}"
    events, tap = [], [{"e": "prompt", "r": 0, "id": call, "ids": prompt, "params": _PARAMS}]
    for word, token in zip(reply, sampled, strict=True):
        choice = {"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}
        events.append(
            {
                "id": call,
                "object": "chat.completion.chunk",
                "created": 1790000000 + turn,
                "model": "model",
                "choices": [choice],
            }
        )
        # vLLM gives float32 log-probs, which JSON writes with up to 17 digits.
        (logprob,) = struct.unpack("f", struct.pack("f", -generator.expovariate(2.0)))
        tap.append({"e": "tok", "r": 0, "i": 0, "ids": [token], "lp": [logprob], "v": "v3"})
    tap.append({"e": "end", "r": 0, "i": 0, "n": len(reply), "finish": "stop", "cached": 0})
    stream = "".join(f"data: {_json(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    started = 1790000000.0 + 30 * turn + generator.random()
    return Exchange(
        id=f"{generator.getrandbits(128):032x}",
        route="chat",
        session=Session(run=f"run-{seed}", peer=f"127.0.0.1:{generator.randrange(30000, 60000)}"),
        upstream="http://127.0.0.1:8000",
        request=Request("POST", "/v1/chat/completions", _HEADERS, Body.of(_json(body).encode())),
        started=started,
        ended=started + 6 + generator.random(),
        outcome="complete",
        response=Response(
            200,
            [("date", "Mon, 30 Nov 2026 11:00:00 GMT"), ("content-type", "text/event-stream")],
            Body.of(stream.encode()),
        ),
        first_byte=started + generator.random(),
        tap=[_json(event) for event in tap],
        tap_source="inline",
    )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


_PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "seed": None}
_HEADERS = [
    ("host", "127.0.0.1:8787"),
    ("content-type", "application/json"),
    ("user-agent", "Anthropic/JS 0.90.0"),
    ("x-stainless-lang", "js"),
    ("x-stainless-runtime-version", "v24.1.0"),
    ("accept-encoding", "gzip, br"),
]


def write(records: list[Exchange], per_frame: int = 1) -> bytes:
    """Return the shard of the records, ``per_frame`` of them in each frame."""
    history, encoder, shard = History(), ShardEncoder(), bytearray()
    for start in range(0, len(records), per_frame):
        place = len(shard)
        lines = [
            history.encode(record, (place, number))
            for number, record in enumerate(records[start : start + per_frame])
        ]
        shard += encoder.frame(lines, start)
    return bytes(shard + end_mark(len(records)))


def sizes(records: list[Exchange]) -> dict[str, int]:
    """Return the bytes that each way to store the records takes."""
    lines = b"".join(map(encode, records))
    return {
        "shard": len(write(records)),
        "raw JSONL": len(lines),
        "gzip -6": len(gzip.compress(lines, 6)),
        "zstd -19": len(zstandard.ZstdCompressor(level=19).compress(lines)),
    }


@dataclass
class Size:
    """One run: bytes per generated token, and how they grow from 25 to 50 turns."""

    run: str
    context_tokens: int
    generated_tokens: int
    bytes_per_token: dict[str, float]
    growth: dict[str, float]


def measure_size(name: str, rewritten: bool) -> Size:
    """Measure one spelling of the run."""
    shape = Shape(TURNS)
    records = list(run(1, shape, rewritten=rewritten))
    generated = TURNS * shape.reply
    half, full = sizes(records[: TURNS // 2]), sizes(records)
    return Size(
        run=name,
        context_tokens=len(json.loads(records[-1].tap[0])["ids"]),
        generated_tokens=generated,
        bytes_per_token={way: size / generated for way, size in full.items()},
        growth={way: size / half[way] for way, size in full.items()},
    )


@dataclass
class Speed:
    """Megabytes (10^6) of raw traffic per second of one core's CPU time."""

    what: str
    record_bytes: int
    per_frame: int
    write: float
    read: float


def measure_speed(what: str, records: list[Exchange], per_frame: int) -> Speed:
    """Encode, compress and write the records, and read them back whole."""
    traffic = sum(weight(record) for record in records)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.jsonl.zst"
        written = _best(lambda: path.write_bytes(write(records, per_frame)))
        read = _best(lambda: _read(path, records))
    size = traffic // len(records)
    return Speed(what, size, per_frame, traffic / written, traffic / read)


def speed_cases() -> Iterator[tuple[str, list[Exchange], int]]:
    """Yield what is written and read: its name, its records, how many of them form a frame."""
    small = Shape(1, system=100, reply=16, result=0, tools=0)
    yield "single small calls", [call for k in range(200) for call in run(k, small)], 8
    short = Shape(20, system=500, reply=100, result=100, tools=2)
    yield "short turns, a run", list(run(1, short)), 1
    runs = zip(*(run(k, short) for k in range(8)), strict=True)
    yield "short turns, 8 runs", [call for calls in runs for call in calls], 8
    yield f"{TURNS} turns to 32k", list(run(1, Shape(TURNS))), 1
    long = Shape(1, system=32_000, tools=12)
    yield "single calls of 32k", [call for k in range(8) for call in run(k, long)], 1
    huge = Shape(8, system=250_000, tools=12)
    yield "turns of 250k", list(run(1, huge)), 1


def _read(path: Path, records: list[Exchange]) -> None:
    found = [located.record for located in read_records(path)]
    assert found == records


def _best(work: Callable[[], object], times: int = 3) -> float:
    """Return the shortest CPU time in microseconds."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken) * 1e6


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()

    found = [measure_size("appended", False), measure_size("rewritten", True)]
    print(f"Bytes per generated token, {TURNS} turns; in brackets the growth from {TURNS // 2}\n")
    ways = list(found[0].bytes_per_token)
    print(f"{'run':<12}{'context':>9}" + "".join(f"{way:>20}" for way in ways))
    for size in found:
        cells = [f"{size.bytes_per_token[w]:,.1f} ({size.growth[w]:.2f}x)" for w in ways]
        print(f"{size.run:<12}{size.context_tokens:>9}" + "".join(f"{c:>20}" for c in cells))

    speeds = []
    print("\nMB of raw traffic per second and core\n")
    print(f"{'':<22}{'bytes a record':>16}{'a frame':>9}{'write':>9}{'read':>9}")
    for what, records, per_frame in speed_cases():
        speed = measure_speed(what, records, per_frame)
        speeds.append(speed)
        print(
            f"{what:<22}{speed.record_bytes:>16,}{per_frame:>9}"
            f"{speed.write:>9,.0f}{speed.read:>9,.0f}"
        )
    if options.json:
        result = {
            "machine": platform.processor() or platform.machine(),
            "sizes": [asdict(size) for size in found],
            "speeds": [asdict(speed) for speed in speeds],
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
