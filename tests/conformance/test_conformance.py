"""What client, upstream and trace shards see through the sidecar is what is there without it.

``python -m tests.conformance`` prints the same as a table; ``compare`` says what is set aside and
lists the known differences.
"""

import pytest

from tests.conformance.cases import all_cases
from tests.conformance.suite import THROUGH, WAYS, Report

# On an idle machine it is some milliseconds more than directly; a loaded one has its own delays.
_NOTICE_SECONDS = 2.0


@pytest.mark.parametrize("case", [case.id for case in all_cases()])
def test_through_the_sidecar_as_without_it(report: Report, case: str) -> None:
    found = report.results[case].differences
    assert {way: differences for way, differences in found.items() if differences} == {}


def test_the_upstream_sees_at_once_that_a_client_has_left(report: Report) -> None:
    for way in WAYS:
        times = [r.notice[way] for r in report.results.values() if way in r.notice]
        assert len(times) >= 15
        assert max(times) < _NOTICE_SECONDS, report.notices()


@pytest.mark.parametrize("way", THROUGH)
def test_the_sidecar_itself_has_nothing_to_report(report: Report, way: str) -> None:
    log = report.sidecar_errors[way]
    assert "capturing failed" not in log and "lost" not in log, log[-3000:]
