"""How the sidecar is, for people and for programs that watch it."""

import time
from collections.abc import Mapping
from typing import Any

from sidecar.capture import Capture
from sidecar.routing.local import LocalCapture
from sidecar.routing.upstreams import Health, Targets
from sidecar.routing.ways import Ways
from sidecar.tokens.sources import Source
from sidecar.traces.writer import Writer


class Status:
    """How the sidecar is."""

    def __init__(
        self,
        targets: Targets,
        ways: Ways,
        sources: Mapping[str, Source],
        writer: Writer,
        capture: Capture,
        health: Health,
        local: LocalCapture | None,
    ) -> None:
        self.tap_available: bool | None = None
        """Whether all model servers that answer have the token tap."""
        self._targets = targets
        self._ways = ways
        self._sources = sources
        self._writer = writer
        self._capture = capture
        self._health = health
        self._local = local
        self._since = time.time()

    def health(self) -> dict[str, Any]:
        """Return what ``/healthz`` answers."""
        writer = self._writer
        reasons = self._reasons()
        return {
            "status": "degraded" if reasons else "ok",
            "reasons": reasons,
            "upstream": self._targets.default.replicas[0].url,
            "upstreams": {
                target.name: [replica.url for replica in target.replicas]
                for target in self._targets.all
            },
            "ways": self._ways.report(),
            "tap_available": self.tap_available,
            "token_sources": dict(self._sources),
            "in_flight": self._capture.in_flight,
            "records_written": writer.written,
            "records_lost": writer.lost,
            "queue_bytes": writer.queued_bytes,
            "uptime_seconds": round(time.time() - self._since, 3),
        }

    def _reasons(self) -> list[str]:
        reasons = []
        if self._writer.failure is not None:
            reasons.append(f"trace shards can't be written: {self._writer.failure}")
        if self._writer.lost:
            reasons.append(f"{self._writer.lost} records lost")
        if "none" in self._sources.values():
            reasons.append("the model server runs without the token tap: no tokens are captured")
        elif "api" in self._sources.values():
            reasons.append(
                "the model server runs without the token tap: tokens are taken from its API, and "
                "the calls can't be trained from"
            )
        elif self._capture.untapped_in_a_row:
            reasons.append(
                f"the last {self._capture.untapped_in_a_row} model calls came without tokens"
            )
        if self._local is not None and self._local.failure is not None:
            reasons.append(self._local.failure)
        for target in self._targets.all:
            ill = [replica.url for replica in target.replicas if not self._health.well(replica)]
            if len(target.replicas) > 1 and ill:
                reasons.append(f"replicas of {target.name} do not answer: {', '.join(ill)}")
        return reasons
