import io

from rich.console import Console

from deploy.demo.progress import Display
from tests.demo.test_report import attempt, version

STATUS = {
    "trainer": {"stage": "waiting for rollouts", "detail": ""},
    "problems": ["engine: away"],
    "versions": [version(0, 0.0, 1.0), version(1, 0.25, 30.0)],
}


def show(terminal: bool) -> str:
    out = io.StringIO()
    display = Display(4, Console(file=out, force_terminal=terminal, width=100))
    with display.shown():
        display.attempt(attempt(0, 0.5))
        display.attempt(attempt(1, None))
        for _ in range(2):
            display.status(STATUS)
    return out.getvalue()


def test_plain_lines_say_each_thing_once():
    lines = show(terminal=False).splitlines()
    assert sum("step 1/4" in line for line in lines) == 1
    assert sum("problem: engine: away" in line for line in lines) == 1
    assert sum("r1 is repeated" in line for line in lines) == 1
    assert "reward 0.25" in next(line for line in lines if "step 1/4" in line)
    assert "600 tokens (20/s)" in next(line for line in lines if "step 1/4" in line)


def test_a_terminal_shows_the_table_and_the_bar():
    text = show(terminal=True)
    assert "1/4" in text
    assert "swap pause" in text
    assert "waiting for rollouts" in text
