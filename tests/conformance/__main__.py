"""``python -m tests.conformance``: run the suite, print the table and every difference."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.conformance import compare, suite
from tests.conformance.cases import all_cases
from tests.conformance.script import Case


def main(argv: list[str]) -> int:
    """Run the cases that are asked for; return the exit status."""
    cases = _cases(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that the sidecars end as well.
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


def _cases(argv: list[str]) -> list[Case]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Compare what passes through the sidecar with what there is without it.",
    )
    parser.add_argument(
        "wanted", nargs="*", metavar="CASE", help="part of the ids of cases to run (default: all)"
    )
    wanted = parser.parse_args(argv).wanted
    cases = list(all_cases())
    for part in wanted:
        if not any(part in case.id for case in cases):
            parser.error(f"no case matches {part!r}")
    return [case for case in cases if not wanted or any(part in case.id for part in wanted)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
