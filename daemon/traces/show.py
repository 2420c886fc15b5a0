"""A call as a conversation for the terminal."""

import json
from collections.abc import Callable, Iterator

from rich.text import Text as Styled

from daemon.protocols.conversation import (
    Image,
    Message,
    Other,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from daemon.traces.plain import moment
from daemon.traces.turns import Turn
from tokenization.calls import version_spans

_STYLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green"}


def lines(turn: Turn, redact: Callable[[str], str]) -> Iterator[Styled]:
    """Yield a call, line by line: what was asked, what came back, and what is known of the tokens.

    ``redact`` is applied to every text of the conversation.
    """
    yield from _head(turn)
    if turn.said is None:
        yield Styled(f"its bodies can't be read: {turn.problem}", "red")
    else:
        request = turn.said.request
        if request.tools:
            names = ", ".join(tool.name for tool in request.tools)
            yield Styled(f"tools: {names}", "dim")
        for prompt in request.prompts or ():
            yield from _said("prompt", "cyan")
            text = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids: {prompt}"
            yield Styled(redact(text))
        for message in request.messages:
            yield from _message(message, redact, "")
        for index, reply in turn.said.replies.items():
            which = f" {index}" if len(turn.said.replies) > 1 else ""
            finish = reply.finish or "broke off"
            yield from _message(reply.message, redact, f"  ← reply{which}, {finish}")
        if turn.said.error is not None:
            yield Styled(f"error: {redact(turn.said.error.message)}", "red")
    yield from _tokens(turn)


def _head(turn: Turn) -> Iterator[Styled]:
    exchange = turn.exchange
    status = f"HTTP {exchange.response.status}" if exchange.response else "no reply"
    yield Styled(f"call {exchange.id}", "bold")
    caller = turn.caller
    who = [f"run {turn.run}"]
    who += [f"{n} {v}" for n, v in (("harness", caller.harness), ("agent", caller.agent)) if v]
    who += [f"subagent of {caller.parent}"] if caller.parent else []
    yield Styled(", ".join(who))
    asked = f"{exchange.request.method} {exchange.upstream}{exchange.request.path}"
    yield Styled(f"{asked}, model {turn.model or 'unknown'}")
    if exchange.renamed:
        yield Styled(f"asked upstream as model {exchange.renamed[1]}")
    started = moment(exchange.started)
    when = started.isoformat(sep=" ", timespec="milliseconds") if started else "at no known time"
    first = (
        f", first byte after {exchange.first_byte - exchange.started:.3f} s"
        if exchange.first_byte is not None
        else ""
    )
    yield Styled(
        f"{when}, {exchange.ended - exchange.started:.3f} s{first}: {status}, {exchange.outcome}"
    )
    if exchange.error:
        yield Styled(exchange.error, "red")


def _message(message: Message, redact: Callable[[str], str], note: str) -> Iterator[Styled]:
    yield from _said(message.role, _STYLES.get(message.role, "yellow"), note)
    for part in message.parts:
        yield from _part(part, redact)


def _said(who: str, style: str, note: str = "") -> Iterator[Styled]:
    yield Styled()
    line = Styled(who, f"bold {style}")
    yield line.append(note, "dim")


def _part(part: Part, redact: Callable[[str], str]) -> Iterator[Styled]:
    match part:
        case Text():
            yield Styled(redact(part.text))
        case Reasoning():
            yield Styled(redact(part.text) if part.text else "(reasoning, encrypted)", "italic dim")
        case ToolCall():
            yield Styled(f"→ {part.name}({redact(part.arguments)})  {part.id}", "yellow")
        case ToolResult():
            failed = " failed" if part.error else ""
            yield Styled(f"← result of {part.call_id}{failed}", "yellow")
            for inner in part.content:
                yield from _part(inner, redact)
        case Image():
            what = " ".join(filter(None, (part.media_type, part.ref, part.sha256)))
            yield Styled(f"(image: {what})", "dim")
        case Other():
            yield Styled(f"({part.kind}: {redact(json.dumps(part.value)[:200])})", "dim")


def _tokens(turn: Turn) -> Iterator[Styled]:
    yield Styled()
    if turn.said is not None and turn.said.usage is not None:
        usage = turn.said.usage
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        yield Styled(
            f"usage: {usage.prompt_tokens} prompt{cached}, {usage.completion_tokens} completion"
        )
    for entry in turn.entries():
        call = entry.call
        if call is not None:
            spans = ", ".join(
                f"v{version} from token {start}" for start, version in version_spans(call.versions)
            )
            yield Styled(
                f"tokens from {call.token_source}: {len(call.prompt_ids)} prompt, "
                f"{len(call.output_ids)} sampled; weights {spans or 'unknown'}"
            )
        style = {"passed": "green", "failed": "red"}.get(entry.check, "yellow")
        reason = f"; not trained: {entry.left_out}" if entry.left_out else ""
        yield Styled(f"checks {entry.check}{reason}", style)
        for failure in entry.failures:
            yield Styled(f"  {failure.name}: {failure.detail}", style)
