"""``python -m tests.conformance``: run the suite, print the table and every difference."""

import signal
import sys
import tempfile
from pathlib import Path

from tests.conformance import compare, suite
from tests.conformance.cases import all_cases


def main(wanted: list[str]) -> int:
    """Run the cases whose ids contain one of ``wanted``, or all; return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that the sidecars end as well.
    cases = [case for case in all_cases() if not wanted or any(w in case.id for w in wanted)]
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        report = suite.run(Path(folder), cases)
    print(report.table())
    for known in compare.KNOWN:
        print(f"known: {', '.join(known.kinds)}: {known.reason}")
    for result in report.differing:
        for way, differences in result.differences.items():
            for difference in differences:
                print(f"DIFF {result.case.id} [{way}]: {difference}")
    print(report.notices())
    print(report.summary())
    return 1 if report.differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
