"""Listing, showing and exporting what shards hold."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from daemon.traces import atif, export, find, listing, openai, show, stats
from daemon.traces.turns import Turn, conversations, read_turn
from sidecar.traces.record import Body, Exchange, RecordsLost, Request, Response, Session
from sidecar.traces.shards import ShardEncoder, read_frames
from tests.daemon.recorded import append, exchange, tap_lines

ASK = {"role": "user", "content": "What does a hammer cost?"}
SYSTEM = {"role": "system", "content": "You are a shop."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "price", "arguments": '{"item": "hammer"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "price", "description": "A price.", "parameters": {"type": "object"}},
    }
]


def chat(
    call: str,
    messages: list[dict[str, Any]],
    reply: dict[str, Any],
    *,
    started: float,
    prompt: list[int],
    output: list[int],
    run: str = "run-1",
    headers: list[tuple[str, str]] | None = None,
) -> Exchange:
    request = {"model": "m", "messages": messages, "tools": TOOLS}
    response = {
        "choices": [{"index": 0, "message": reply, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output)},
    }
    return Exchange(
        id=call,
        route="chat",
        session=Session(run=run, peer="127.0.0.1:5000"),
        upstream="http://127.0.0.1:8000",
        request=Request(
            "POST",
            "/v1/chat/completions",
            headers or [("user-agent", "Agents/Python 0.24.0")],
            Body.of(json.dumps(request).encode()),
        ),
        started=started,
        ended=started + 0.5,
        outcome="complete",
        response=Response(
            200, [("content-type", "application/json")], Body.of(json.dumps(response).encode())
        ),
        tap=tap_lines(prompt, [output]),
        tap_source="inline",
    )


def two_turns() -> list[Exchange]:
    """A tool call and the answer after its result."""
    first = chat("a1", [SYSTEM, ASK], CALL, started=1.0, prompt=[1, 2, 3], output=[4, 5])
    # The harness writes the arguments with other spacing.
    echoed = json.loads(json.dumps(CALL))
    echoed["tool_calls"][0]["function"]["arguments"] = '{"item":"hammer"}'
    answer = {"role": "assistant", "content": "It costs 12."}
    second = chat(
        "a2",
        [SYSTEM, ASK, echoed, RESULT],
        answer,
        started=2.0,
        prompt=[1, 2, 3, 4, 5, 6],
        output=[7],
    )
    return [first, second]


def turns(exchanges: list[Exchange]) -> list[Turn]:
    return [read_turn(one) for one in exchanges]


def plain(turn: Turn, redact: Any = str) -> str:
    return "\n".join(line.plain for line in show.lines(turn, redact))


def test_a_conversation_ends_with_the_call_that_no_other_goes_on_from() -> None:
    alone = chat("b1", [ASK], CALL, started=1.5, prompt=[1], output=[2], run="run-2")
    found = conversations(turns([*two_turns(), alone]))
    assert [one.last.exchange.id for one in found] == ["b1", "a2"]
    assert {k: turn.exchange.id for k, turn in found[1].earlier.items()} == {1: "a1"}
    assert [m.role for m in found[1].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_the_same_request_of_two_agents_is_two_conversations() -> None:
    headers = [("x-claude-code-agent-id", "sub"), ("x-claude-code-session-id", "s")]
    first, second = two_turns()
    other = chat("a3", [SYSTEM, ASK], CALL, started=1.2, prompt=[1], output=[2], headers=headers)
    found = conversations(turns([first, other, second]))
    assert [one.last.exchange.id for one in found] == ["a3", "a2"]


def test_a_cut_off_reply_is_no_end_of_a_conversation() -> None:
    first, second = two_turns()
    cut = Exchange(
        **{f: getattr(second, f) for f in second.__struct_fields__} | {"outcome": "cancelled"}
    )
    assert [one.last.exchange.id for one in conversations(turns([first, cut]))] == ["a1"]


def test_openai_example() -> None:
    (found,) = conversations(turns(two_turns()))
    assert openai.example(found) == {
        "messages": [
            SYSTEM,
            ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "price", "arguments": '{"item":"hammer"}'},
                    }
                ],
            },
            RESULT,
            {"role": "assistant", "content": "It costs 12."},
        ],
        "tools": TOOLS,
    }


def test_openai_example_of_an_image_without_url_is_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}
    answer = {"role": "assistant", "content": "A cat."}
    call = chat("a1", [message], answer, started=1.0, prompt=[1], output=[2])
    report = export.Exported()
    assert list(export.documents(turns([call]), "openai", str, report)) == []
    assert report.left_out == {"an image that is not given by its URL": 1}


def test_atif_trajectory() -> None:
    (found,) = conversations(turns(two_turns()))
    made = atif.trajectory(found)
    assert made["schema_version"] == "ATIF-v1.4" and made["session_id"] == "run-1"
    assert made["agent"] == {"name": "openai-agents", "version": "0.24.0", "model_name": "m"}
    assert [(s["step_id"], s["source"], s["message"]) for s in made["steps"]] == [
        (1, "system", "You are a shop."),
        (2, "user", "What does a hammer cost?"),
        (3, "agent", ""),
        (4, "agent", "It costs 12."),
    ]
    called, answered = made["steps"][2:]
    assert called["tool_calls"] == [
        {"tool_call_id": "call_1", "function_name": "price", "arguments": {"item": "hammer"}}
    ]
    assert called["observation"] == {"results": [{"source_call_id": "call_1", "content": "12"}]}
    assert called["metrics"]["prompt_token_ids"] == [1, 2, 3]
    assert called["metrics"]["completion_token_ids"] == [4, 5]
    assert called["metrics"]["logprobs"] == pytest.approx([-0.504, -0.505])
    assert called["metrics"]["extra"] == {
        "call": "a1",
        "token_source": "engine",
        "weight_versions": [{"from_token": 0, "version": "v0"}],
    }
    assert answered["metrics"]["completion_token_ids"] == [7]
    assert made["final_metrics"] == {
        "total_steps": 4,
        "total_prompt_tokens": 9,
        "total_completion_tokens": 3,
    }
    assert made["extra"]["calls"] == ["a1", "a2"]


def test_a_call_whose_checks_failed_gives_no_token_ids() -> None:
    wrong = exchange("a1", prompt=[1, 2, 3], usage={"prompt_tokens": 9, "completion_tokens": 2})
    (found,) = conversations(turns([wrong]))
    metrics = atif.trajectory(found)["steps"][-1]["metrics"]
    assert metrics["prompt_tokens"] == 9 and "prompt_token_ids" not in metrics


def test_redaction_takes_the_ids_of_what_it_changes() -> None:
    report = export.Exported()
    found = turns(two_turns())
    hide = lambda text: text.replace("hammer", "…")  # noqa: E731
    (clean,) = export.documents(found, "atif", hide, report)
    assert "hammer" not in json.dumps(clean)
    assert not any("prompt_token_ids" in step.get("metrics", {}) for step in clean["steps"])
    (kept,) = export.documents(found, "atif", str, report)
    assert any("prompt_token_ids" in step.get("metrics", {}) for step in kept["steps"])


def test_show_says_what_was_said_and_what_the_tokens_are() -> None:
    text = plain(read_turn(two_turns()[1]))
    for expected in (
        "call a2",
        "run run-1, harness openai-agents",
        "tools: price",
        "You are a shop.",
        '→ price({"item":"hammer"})  call_1',
        "← result of call_1",
        "assistant  ← reply, stop",
        "It costs 12.",
        "usage: 6 prompt, 1 completion",
        "tokens from engine: 6 prompt, 1 sampled; weights v0 from token 0",
        "checks passed",
    ):
        assert expected in text, text


def test_show_of_bodies_that_can_not_be_read() -> None:
    garbled = exchange("a1")
    request = Request("POST", "/v1/chat/completions", [], Body.of(b"{"))
    broken = Exchange(
        **{f: getattr(garbled, f) for f in garbled.__struct_fields__} | {"request": request}
    )
    text = plain(read_turn(broken))
    assert "can't be read" in text and "checks failed" in text


def test_listing_row() -> None:
    row = listing.row(read_turn(two_turns()[0]))
    assert (row["prompt_tokens"], row["completion_tokens"], row["token_source"]) == (3, 2, "engine")
    assert (row["run"], row["model"], row["status"]) == ("run-1", "m", 200)


def test_stats_count_what_is_there_lost_and_damaged(tmp_path: Path) -> None:
    shard = append(tmp_path / "one", [two_turns(), [RecordsLost(1.0, 3, "the queue was full")]])
    whole = stats.collect([tmp_path])
    assert whole.calls == {"chat complete": 2} and whole.runs == 1
    assert (whole.prompt_tokens, whole.completion_tokens) == (9, 3)
    assert whole.records_lost == {"the queue was full": 3}
    assert not whole.damaged and not whole.torn
    data = bytearray(shard.read_bytes())
    data[60] ^= 0xFF
    shard.write_bytes(data + b"PK")
    broken = stats.collect([tmp_path])
    assert len(broken.damaged) == 1 and broken.torn == [shard.name]
    assert broken.records_lost == {"the queue was full": 3}


def ridealong(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy", "traces", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands(tmp_path: Path) -> None:
    append(tmp_path / "one", [two_turns()])
    folder = str(tmp_path)
    listed = ridealong("ls", folder)
    assert listed.returncode == 0 and "a1" in listed.stdout and "6+1 engine" in listed.stdout
    assert "It costs 12." in ridealong("show", "a2", folder).stdout
    ambiguous = ridealong("show", "a", folder)
    assert ambiguous.returncode == 2 and "several calls" in ambiguous.stderr
    whole = [json.loads(line) for line in ridealong("cat", folder).stdout.splitlines()]
    assert [one["id"] for one in whole] == ["a1", "a2"]
    assert json.loads(ridealong("stats", folder, "--json").stdout)["runs"] == 1
    out = tmp_path / "out"
    done = ridealong("export", folder, "--format", "atif", "--output", str(out))
    assert done.returncode == 0 and done.stderr == "1 written\n"
    (document,) = out.glob("*.json")
    assert json.loads(document.read_text())["session_id"] == "run-1"


def test_commands_with_text_and_times_of_a_hostile_agent(tmp_path: Path) -> None:
    evil = "\x1b]0;mine\x07\x1b[2J\x9b31m[/bold]"
    said = {"role": "assistant", "content": evil}
    call = chat("a1", [ASK], said, started=1.0, prompt=[1], output=[2], run=f"r{evil}")
    assert call.request.body is not None
    text = (call.request.body.text or "").replace('"m"', json.dumps(f"m{evil}"))
    request = structs.replace(call.request, body=Body(text=text))
    append(tmp_path / "one", [[structs.replace(call, request=request, started=1e18, ended=1e18)]])
    for command in (["ls"], ["show", "a1"], ["export", "--format", "atif"]):
        done = ridealong(*command, str(tmp_path))
        assert (done.returncode, done.stderr[:1000].count("Traceback")) == (0, 0), done.stderr
        unsafe = "\x07\x1b" if command[0] == "export" else "\x07\x1b\x9b"  # JSON escapes C0 only.
        assert not any(character in done.stdout for character in unsafe)
        assert "[/bold]" in done.stdout


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    result = ridealong("ls", str(tmp_path / "nowhere"))
    assert result.returncode == 2 and "nowhere" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    empty = ridealong("stats", str(tmp_path))
    assert empty.returncode == 2 and "no trace shards" in empty.stderr


def test_a_file_that_is_no_shard_is_named(tmp_path: Path) -> None:
    shard = append(tmp_path / "one", [two_turns()])
    renamed = shard.rename(tmp_path / "renamed")
    assert find.shards([renamed]) == [renamed]
    for name, data in (("stub.py", b"import json\n" * 20), ("empty", b""), ("short", b"PK")):
        (tmp_path / name).write_bytes(data)
        for command in (["ls"], ["show", "a1"], ["cat"], ["stats"], ["export"]):
            if name == "stub.py" or command == ["ls"]:
                result = ridealong(*command, str(tmp_path / name))
                assert (result.returncode, result.stdout) == (2, "")
                assert f"{name} is no trace shard" in result.stderr


def test_damage_is_told_once_per_place(tmp_path: Path) -> None:
    first, second = two_turns()
    shard = append(tmp_path / "one", [[first], [second, second], [first]])
    data = bytearray(shard.read_bytes())
    frames = [frame.offset for frame in read_frames(shard)]
    data[frames[1] + 60] ^= 0xFF
    shard.write_bytes(data)
    expected = f"damaged: {shard.name} at {frames[1]}: the data does not match its checksum\n"
    assert expected in ridealong("stats", str(tmp_path)).stdout
    listed = ridealong("ls", str(tmp_path))
    assert (listed.returncode, listed.stderr) == (0, expected) and "a1" in listed.stdout
    exported = ridealong("export", str(tmp_path))
    assert (exported.returncode, exported.stderr) == (0, expected + "2 written\n")


def test_lines_of_one_damaged_frame_are_one_place(tmp_path: Path) -> None:
    shard = tmp_path / "one.jsonl.zst"
    shard.write_bytes(ShardEncoder().frame([b"{\n", b"[\n"]))
    told: list[str] = []
    assert not list(find.exchanges([tmp_path], find.Query(), told.append))
    assert len(told) == 1 and told[0].startswith("damaged: one.jsonl.zst at 0: ")


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["show", "a1"], ["cat"], ["export"]])
def test_output_that_can_not_be_written(tmp_path: Path, command: list[str]) -> None:
    append(tmp_path / "one", [two_turns()])
    whole = [sys.executable, "-m", "deploy", "traces", *command, str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            whole, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.stderr == "ridealong traces: standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("command", [["ls", "--json"], ["cat"], ["export"]])
def test_a_reader_that_has_left_is_no_error(tmp_path: Path, command: list[str]) -> None:
    append(tmp_path / "one", [two_turns()])
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "traces", *command, str(tmp_path)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("last", ["-3", "0", "x"])
def test_last_is_a_number_of_calls(tmp_path: Path, last: str) -> None:
    append(tmp_path / "one", [two_turns()])
    refused = ridealong("ls", str(tmp_path), "--last", last)
    assert refused.returncode == 2
    assert f"argument --last: '{last}' is not a whole number above 0" in refused.stderr


def test_redaction_is_for_what_people_read(tmp_path: Path) -> None:
    append(tmp_path / "one", [two_turns()])
    config = tmp_path / "ridealong.toml"
    config.write_text('[daemon]\nredact = ["hammer"]\n')
    for command in (["show", "a1"], ["export"]):
        done = ridealong(*command, str(tmp_path), "--config", str(config))
        assert done.returncode == 0 and "hammer" not in done.stdout
    assert "hammer" in ridealong("cat", str(tmp_path)).stdout
    assert "unredacted" in ridealong("cat", "--help").stdout


def test_a_query_takes_what_it_names() -> None:
    first, second = two_turns()
    assert find.Query(call="a1").takes(first) and not find.Query(call="a1").takes(second)
    assert find.Query(run="run-1", route="chat").takes(first)
    assert not find.Query(outcome="cancelled").takes(first)
