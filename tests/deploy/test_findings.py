"""What the doctor makes of a probe."""

import msgspec
import pytest

from deploy.doctor.findings import Finding, judge, usable
from deploy.doctor.probes import Answer, Model, Probe, probes, request
from sidecar.traces.record import Exchange, Outcome, Request, Route, Session, TapSource

CHAT = Probe("chat", "streamed", "r")


def record(outcome: Outcome = "complete", source: TapSource = "inline") -> Exchange:
    return Exchange(
        id="1" * 32,
        route="chat",
        session=Session(run="r"),
        upstream="http://127.0.0.1:8000",
        request=Request("POST", "/v1/chat/completions", []),
        started=1.0,
        ended=2.0,
        outcome=outcome,
        tap_source=source,
    )


def test_all_is_well() -> None:
    assert judge(CHAT, Answer(200), record(), []) == Finding(CHAT, True, "tap")


@pytest.mark.parametrize(
    ("answer", "exchange", "checks", "words"),
    [
        (Answer(0, "connection reset"), None, None, "connection reset"),
        (Answer(401, "no key"), record(), None, "HTTP 401: no key"),
        (Answer(200), None, None, "no record"),
        (Answer(200), record("upstream_error"), [], "recorded as upstream_error"),
        (Answer(200), record(source="none"), [], "no tokens"),
        (Answer(200), record(), ["usage"], "fail a check: usage"),
        (Answer(200, "one piece"), record(), [], "one piece"),
    ],
)
def test_what_is_wrong_is_said(
    answer: Answer, exchange: Exchange | None, checks: list[str] | None, words: str
) -> None:
    finding = judge(CHAT, answer, exchange, checks)
    assert not finding.ok and finding.problem is not None and words in finding.problem


def test_a_hung_up_call_must_be_recorded_as_cancelled() -> None:
    probe = Probe("messages", "cancelled", "r")
    assert judge(probe, Answer(200), record("cancelled", "pulled"), []).ok
    assert not judge(probe, Answer(200), record("complete"), []).ok


def test_tools_that_the_server_refuses() -> None:
    finding = judge(Probe("chat", "tool", "r"), Answer(400, "auto"), record(), None)
    assert finding.fix is not None and "tool_call_parser" in finding.fix


def test_a_protocol_that_is_not_offered_is_no_fault() -> None:
    finding = judge(Probe("messages", "plain", "r"), Answer(404, "Not Found"), record(), None)
    assert finding.ok and usable([finding]) == {"messages": "-"}


def test_one_probe_without_tokens_spoils_the_protocol() -> None:
    def finding(source: str) -> Finding:
        return Finding(CHAT, True, source)

    assert usable([finding("tap"), finding("tap")]) == {"chat": "tap"}
    assert usable([finding("tap"), finding("api"), finding("-")]) == {"chat": "api"}
    assert usable([finding("api"), finding("none")]) == {"chat": "none"}


def test_every_route_is_probed_in_every_way_it_has() -> None:
    found = probes("tag")
    assert len(found) == len({probe.run for probe in found}) == 15
    paths: dict[Route, str] = {probe.route: request(probe, Model("m"))[0] for probe in found}
    assert paths == {
        "chat": "/v1/chat/completions",
        "completions": "/v1/completions",
        "responses": "/v1/responses",
        "messages": "/v1/messages",
    }


@pytest.mark.parametrize(("length", "limit"), [(None, 2000), (32768, 2000), (512, 256)])
def test_a_call_to_hang_up_on_fits_the_model(length: int | None, limit: int) -> None:
    for probe in probes("tag"):
        _, body = request(probe, Model("m", length))
        asked = body.get("max_tokens", body.get("max_output_tokens"))
        assert asked == (limit if probe.kind == "cancelled" else 32)


def test_why_no_reply_came_is_taken_from_the_record() -> None:
    failed = msgspec.structs.replace(record("upstream_error"), error="Connect call failed")
    finding = judge(CHAT, Answer(0, "Server disconnected"), failed, None)
    assert (
        finding.problem
        == "the sidecar's request to http://127.0.0.1:8000 failed: Connect call failed"
    )
    assert finding.fix is not None and "start the model server" in finding.fix
