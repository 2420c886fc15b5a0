"""The daemon's HTTP API: registering runs, rewards, and the answer to where everything is.

Errors are JSON, ``{"error": "one line"}``: 400 for a request of the wrong shape, 404 for an unknown
run or call, 409 for one that contradicts what was said or decided before, 500 for a fault of ours.
"""

import contextlib
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.runs import is_given
from daemon.state import Conflict, State
from daemon.status import StatusReport
from deploy.errors import UserError
from sidecar.access.keys import is_run, not_a_run

logger = logging.getLogger(__name__)

MAX_GROUP_SIZE = 10_000
MAX_REWARD = 1e6

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Label = Annotated[str, msgspec.Meta(max_length=4096)]


class NewRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/runs``. ``rewards`` names the rewards that the run must have before it is
    graded; without names any one does."""

    run: Identifier
    group: Identifier | None = None
    group_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUP_SIZE)] | None = None
    task: Label = ""
    rewards: list[Identifier] = []


class RunEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/runs/{run}/end``."""

    status: Literal["completed", "agent_failure", "infrastructure_failure"]


class NewReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/rewards``: for a run or for a call. A run's reward is the sum of all."""

    value: float
    run: Identifier | None = None
    call: Identifier | None = None
    name: Identifier = "reward"
    key: Identifier | None = None


def parse_loopback(listen: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        UserError: it has another form, or the host is not a loopback address.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        number = int(port)
    except ValueError:
        raise UserError(
            f"daemon.listen is {listen!r}; write HOST:PORT, as 127.0.0.1:8790"
        ) from None
    if not loopback:
        raise UserError(
            f"daemon.listen is {listen!r}, not a loopback address: the API has no authentication; "
            "use 127.0.0.1 and a tunnel"
        )
    return host, number


class Api:
    """Handlers over the state."""

    def __init__(self, state: State, report: StatusReport, reward_window: float) -> None:
        self._state = state
        self._report = report
        self._reward_window = reward_window
        self._registry = CollectorRegistry()
        self._registry.register(_StatusCollector(report))

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors])
        app.router.add_get("/healthz", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/status", self.status)
        app.router.add_get("/v1/steps", self.steps)
        app.router.add_get("/v1/runs/{run}", self.run)
        app.router.add_get("/v1/calls/{call}", self.call)
        app.router.add_post("/v1/runs", self.register)
        app.router.add_post("/v1/runs/{run}/end", self.end)
        app.router.add_post("/v1/rewards", self.reward)
        return app

    async def health(self, request: web.Request) -> web.Response:
        problems = self._report.problems()
        return web.json_response({"status": "degraded" if problems else "ok", "problems": problems})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self._report.status())

    async def steps(self, request: web.Request) -> web.Response:
        steps = self._state.rows("SELECT * FROM steps ORDER BY number")
        for step in steps:
            step["metrics"] = json.loads(step["metrics"])
        return web.json_response({"steps": steps, "versions": self._report.versions()})

    async def run(self, request: web.Request) -> web.Response:
        run = request.match_info["run"]
        row = self._state.row("SELECT * FROM runs WHERE id = ?", run)
        if row is None:
            raise _NotFound(f"no run {run}: none was registered or seen under that id")
        row["rewards_expected"] = json.loads(row["rewards_expected"])
        row["calls"] = [_call(c) for c in self._state.calls_of(run)]
        row["rewards"] = self._state.rows("SELECT * FROM rewards WHERE run = ?", run)
        row["trained"] = self._state.row("SELECT step, reward FROM step_runs WHERE run = ?", run)
        return web.json_response(row)

    async def call(self, request: web.Request) -> web.Response:
        call = request.match_info["call"]
        row = self._state.row("SELECT * FROM calls WHERE id = ?", call)
        if row is None:
            raise _NotFound(f"no call {call}")
        return web.json_response(_call(row))

    async def register(self, request: web.Request) -> web.Response:
        new = await _body(request, NewRun)
        self._check_run(new.run)
        self._state.register_run(new.run, new.group, new.group_size, new.task, new.rewards)
        return web.json_response({"run": new.run})

    async def end(self, request: web.Request) -> web.Response:
        run, end = request.match_info["run"], await _body(request, RunEnd)
        try:
            self._state.end_run(run, end.status)
        except KeyError:
            raise _NotFound(f"no run {run}: none was registered or seen under that id") from None
        return web.json_response({"run": run, "status": end.status})

    async def reward(self, request: web.Request) -> web.Response:
        new = await _body(request, NewReward)
        if (new.run is None) == (new.call is None):
            raise _BadRequest("name either a run or a call")
        if new.run is not None:
            self._check_run(new.run)
        if not abs(new.value) <= MAX_REWARD:
            raise _BadRequest(
                f"the value must lie between {-MAX_REWARD:.0f} and {MAX_REWARD:.0f}, "
                f"not {new.value:g}: scale the rewards down"
            )
        key = self._state.add_reward(
            run=new.run,
            call=new.call,
            name=new.name,
            value=new.value,
            key=new.key,
            window=self._reward_window,
        )
        return web.json_response({"key": key})

    def _check_run(self, run: str) -> None:
        """Refuse what no run can be called. A run that is there already has a name of its own:
        the ``x-ridealong-session`` header may have any characters."""
        if is_run(run) or not is_given(run):
            return
        if self._state.row("SELECT 1 FROM runs WHERE id = ?", run) is None:
            raise _BadRequest(not_a_run(run))


class _BadRequest(Exception):
    pass


class _NotFound(Exception):
    pass


async def _body[T: msgspec.Struct](request: web.Request, shape: type[T]) -> T:
    raw = b""
    try:
        raw = await request.read()
        return msgspec.json.decode(raw, type=shape)
    except web.HTTPException:
        raise
    except Exception as error:  # Whatever is wrong with the body: its encoding, nesting, shape.
        reason = _not_finite(raw) or " ".join(str(error).split())
        raise _BadRequest(f"{request.method} {request.path}: {reason}") from None


def _not_finite(raw: bytes) -> str | None:
    """Say what is wrong with a body that names NaN or an infinity, as many programs write them."""
    names: list[str] = []
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(raw, parse_constant=names.append)
    return f"a value has to be a finite number, not {names[0]}" if names else None


def _call(row: dict[str, Any]) -> dict[str, Any]:
    """A call as the API shows it; ``versions`` lists first token position and weight version."""
    row["failures"] = json.loads(row["failures"])
    row["versions"] = [[at, f"v{number}"] for at, number in json.loads(row["versions"])]
    return row


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    where = f"{request.method} {request.path}"
    try:
        return await handler(request)
    except (_BadRequest, _NotFound, Conflict) as error:
        status = {_BadRequest: 400, _NotFound: 404, Conflict: 409}[type(error)]
        reason = str(error)
    except web.HTTPException as error:
        status, reason = error.status, f"{where}: {error.reason}"
    except UnicodeError:
        status, reason = 400, f"{where}: a name is not valid Unicode"
    except Exception as error:
        logger.exception("%s failed", where)
        status, reason = 500, f"{where}: {type(error).__name__}, see the daemon's log"
    return web.json_response({"error": reason}, status=status)


class _StatusCollector(Collector):
    """Prometheus metrics, computed from the status when they are asked for."""

    def __init__(self, report: StatusReport) -> None:
        self._report = report

    def collect(self) -> "list[Metric]":
        status = self._report.status()
        by_key = (
            ("ridealong_calls", "Model calls by status.", "status", status["calls"]),
            ("ridealong_calls_left_out", "Calls not trained.", "reason", status["left_out"]),
            ("ridealong_check_failures", "Failed checks.", "check", status["checks"]["failures"]),
            ("ridealong_forks", "Branches in runs' call trees.", "reason", status["forks"]),
            ("ridealong_runs", "Runs by state.", "state", status["runs"]),
            ("ridealong_groups", "Groups by state.", "state", status["groups"]),
            (
                "ridealong_samples",
                "Samples by the state of their step.",
                "state",
                status["samples"],
            ),
            ("ridealong_trace_faults", "Faults in traces.", "kind", status["traces"]["faults"]),
        )
        metrics: list[Metric] = []
        for name, text, label, values in by_key:
            family = GaugeMetricFamily(name, text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            metrics.append(family)
        live = status["live_version"]
        for name, text, value in (
            ("ridealong_degraded", "1 when something is wrong.", bool(status["problems"])),
            (
                "ridealong_live_version",
                "Number of the live version.",
                int(live[1:]) if live else -1,
            ),
            ("ridealong_trainer_deaths", "Times the trainer died.", status["trainer"]["deaths"]),
        ):
            metrics.append(GaugeMetricFamily(name, text, value=float(value)))
        return metrics
