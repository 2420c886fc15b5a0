"""``ridealong traces``: reads trace shards, also while they are written."""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from deploy.errors import UserError

_FOLLOW_SECONDS = 0.5
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def add(commands: Any) -> None:
    """Add the command and its subcommands to a parser's."""
    text = "look into trace shards: list, show, count, export"
    traces = commands.add_parser("traces", help=text, description=text[0].upper() + text[1:] + ".")
    inner = traces.add_subparsers(title="commands", dest="what", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = inner.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(function=_reporting(function), parser=sub)
        return sub

    def reads(sub: Any) -> None:
        sub.add_argument(
            "paths",
            nargs="*",
            type=Path,
            default=[Path("traces")],
            metavar="PATH",
            help="folders with shards, or shards (default: traces)",
        )

    def selects(sub: Any) -> None:
        sub.add_argument("--run", metavar="ID", help="only calls of this run")
        sub.add_argument("--outcome", choices=["complete", "cancelled", "upstream_error"])
        sub.add_argument("--route", choices=["chat", "completions", "responses", "messages"])

    def redacts(sub: Any) -> None:
        sub.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML configuration: daemon.redact"
        )

    sub = command("ls", _ls, "list the recorded model calls")
    reads(sub)
    selects(sub)
    sub.add_argument("--last", type=_positive, metavar="N", help="only the last N")
    sub.add_argument("--json", action="store_true", help="one JSON object per call")

    sub = command("show", _show, "show a call as a conversation")
    sub.add_argument("call", help="id of the call, or how it begins")
    reads(sub)
    redacts(sub)

    sub = command("cat", _cat, "write the records whole and unredacted, one JSON object per line")
    reads(sub)
    sub.add_argument("--follow", action="store_true", help="go on as records are written")

    sub = command("stats", _stats, "count what the shards hold, and what is lost or damaged")
    reads(sub)
    sub.add_argument("--json", action="store_true")

    sub = command("export", _export, "write conversations for other programs")
    reads(sub)
    selects(sub)
    redacts(sub)
    sub.add_argument(
        "--format",
        choices=["jsonl", "openai", "atif"],
        default="jsonl",
        help="jsonl: one object per call; openai: fine-tuning file, one line per conversation; "
        "atif: Agent Trajectory Interchange Format",
    )
    sub.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="file (for atif a folder, which gets a file per conversation); default: lines to "
        "standard output",
    )

    sub = command("reassemble", _reassemble, "read all calls anew that no step has trained yet")
    sub.add_argument("--traces", type=Path, default=Path("traces"), metavar="DIR")
    sub.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="the daemon's directory"
    )
    sub.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML configuration: daemon.train_side_calls and daemon.redact",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _reporting(
    function: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Wrap a command: output that can't be written, as on a full disk, is one line and status 1."""

    def run(args: argparse.Namespace) -> int:
        try:
            status = function(args)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            where, reason = error.filename or "standard output", error.strerror or error
            print(f"ridealong traces: {where}: {reason}", file=sys.stderr)
            # Keep the exit from flushing into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return status

    return run


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _turns(args: argparse.Namespace, call: str | None = None) -> Iterator[Any]:
    from daemon.traces.find import Query, exchanges
    from daemon.traces.turns import read_turn

    query = Query(
        call=call,
        run=getattr(args, "run", None),
        route=getattr(args, "route", None),
        outcome=getattr(args, "outcome", None),
    )
    for exchange in exchanges(args.paths, query, _warn):
        if exchange.route != "other":
            yield read_turn(exchange)


def _ls(args: argparse.Namespace) -> int:
    from rich.console import Console

    from daemon.traces import listing

    rows = [listing.row(turn) for turn in _turns(args)]
    if args.last is not None:
        rows = rows[-args.last :]
    if args.json:
        for row in rows:
            _line(sys.stdout, row)
        return 0
    console = Console()
    # A pipe has no width: nothing is to be cut for it.
    Console(width=None if console.is_terminal else 400).print(listing.table(rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from daemon.traces import show
    from daemon.traces.plain import visible

    found = list(itertools.islice(_turns(args, call=args.call), 11))
    if not found:
        raise UserError(f"no call {args.call} in {_names(args.paths)}: see `ridealong traces ls`")
    if len(found) > 1:
        ids = ", ".join(turn.exchange.id for turn in found[:10])
        raise UserError(f"several calls begin with {args.call}: {ids}")
    console = Console(highlight=False)
    for line in show.lines(found[0], _redaction(args)):
        line.plain = visible(line.plain)
        console.print(line, soft_wrap=True)
    return 0


def _cat(args: argparse.Namespace) -> int:
    from daemon.traces import find
    from sidecar.traces import record
    from sidecar.traces.reader import RecordReader

    readers: dict[Path, tuple[RecordReader, int]] = {}
    damaged = 0
    while True:
        for shard in find.shards(args.paths):
            reader, offset = readers.get(shard) or (RecordReader(shard), 0)
            for frame, located in reader.frames(offset):
                for one in located:
                    if one.record is None:
                        damaged += one.count
                        print(f"{shard} at {one.frame}: {one.error}", file=sys.stderr)
                    else:
                        sys.stdout.buffer.write(record.encode(one.record))
                offset = frame.next_offset
            readers[shard] = reader, offset
        sys.stdout.flush()
        if not args.follow:
            return 1 if damaged else 0
        time.sleep(_FOLLOW_SECONDS)


def _stats(args: argparse.Namespace) -> int:
    from daemon.traces import stats

    found = stats.collect(args.paths)
    if args.json:
        _line(sys.stdout, found.as_dict())
    else:
        print("\n".join(stats.lines(found)))
    return 0


def _export(args: argparse.Namespace) -> int:
    from daemon.traces.export import Exported, documents

    report = Exported()
    found = documents(_turns(args), args.format, _redaction(args), report)
    try:
        if args.output is None:
            for document in found:
                _line(sys.stdout, document)
            sys.stdout.flush()  # Before it is said to be written.
        elif args.format == "atif":
            args.output.mkdir(parents=True, exist_ok=True)
            for number, document in enumerate(found):
                name = f"{number:05d}-{_UNSAFE.sub('_', document['session_id'])[:100]}.json"
                with (args.output / name).open("w", encoding="utf-8") as file:
                    _line(file, document)
        else:
            with args.output.open("w", encoding="utf-8") as file:
                for document in found:
                    _line(file, document)
    except OSError as error:
        if args.output is None:
            raise
        raise UserError(f"{args.output} can't be written: {error.strerror or error}") from None
    print(f"{report.written} written", file=sys.stderr)
    for reason, count in report.left_out.most_common():
        print(f"{count} left out: {reason}", file=sys.stderr)
    return 0


def _reassemble(args: argparse.Namespace) -> int:
    from daemon.reassemble import reassemble
    from daemon.redaction import Redactor
    from deploy import config

    daemon = config.load(args.config).daemon
    report = reassemble(
        args.traces, args.directory, daemon.train_side_calls, Redactor(daemon.redact)
    )
    print(report)
    return 0


def _redaction(args: argparse.Namespace) -> Callable[[str], str]:
    from daemon.redaction import Redactor
    from deploy import config

    return Redactor(config.load(args.config).daemon.redact).redact


def _line(file: TextIO, value: dict[str, Any]) -> None:
    import msgspec

    file.write(msgspec.json.encode(value).decode() + "\n")


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))
