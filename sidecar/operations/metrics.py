"""The sidecar's counters, in a registry of their own."""

from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sidecar.call import Call
from sidecar.traces.record import Outcome
from sidecar.traces.writer import Writer

# A model call takes from a tenth of a second to minutes.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ADDED_SECONDS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5, 1, 2.5)

Phase = Literal["request", "reply_head", "reply_end"]


class Metrics:
    """Counted a few times per call: nothing here costs per streamed chunk."""

    def __init__(self, writer: Writer) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "ridealong_sidecar_calls",
            "Exchanges that have ended.",
            ["route", "outcome", "token_source"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "ridealong_sidecar_call_seconds",
            "From request headers to the end of the reply.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        added = Histogram(
            "ridealong_sidecar_added_seconds",
            "What capturing adds to a model call, by phase. request: from its head to its "
            "forwarding, with the wait for its body where that is needed. reply_head: from the "
            "upstream's to its forwarding. reply_end: from the upstream's last byte to the last "
            "one for the agent, with the wait for the record.",
            ["phase"],
            buckets=_ADDED_SECONDS,
            registry=self.registry,
        )
        self._added: dict[Phase, Histogram] = {
            phase: added.labels(phase) for phase in get_args(Phase)
        }
        body_bytes = Counter(
            "ridealong_sidecar_body_bytes",
            "Body bytes of model calls, as the agent sent or received them.",
            ["direction"],
            registry=self.registry,
        )
        self._bytes_in, self._bytes_out = body_bytes.labels("request"), body_bytes.labels("reply")
        self._chunks = Counter(
            "ridealong_sidecar_stream_chunks",
            "Pieces of reply bodies forwarded.",
            registry=self.registry,
        )
        self._tap_lines = Counter(
            "ridealong_sidecar_tap_lines", "Token tap lines received.", registry=self.registry
        )
        self.untapped = Counter(
            "ridealong_sidecar_untapped_calls",
            "Model calls that were answered without tokens although they had been asked for.",
            registry=self.registry,
        )
        self.faults = Counter(
            "ridealong_sidecar_faults",
            "Faults of the sidecar's own capturing; the traffic went on.",
            registry=self.registry,
        )
        self._refused = Counter(
            "ridealong_sidecar_refused",
            "Requests that the sidecar answered itself: no key, too large, ambiguous.",
            ["status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "ridealong_sidecar_in_flight", "Exchanges going on now.", registry=self.registry
        )
        self.tap_available = Gauge(
            "ridealong_tap_available",
            "1 if the model server's token tap is at work, 0 if not, NaN while unknown.",
            registry=self.registry,
        )
        self.tap_available.set(float("nan"))
        self.registry.register(_WriterCollector(writer))

    def added(self, phase: Phase, seconds: float) -> None:
        """Note how long capturing held up a model call."""
        self._added[phase].observe(seconds)

    def refused(self, status: int) -> None:
        """Count a request that was refused."""
        self._refused.labels(str(status)).inc()

    def ended(self, call: Call, outcome: Outcome, seconds: float) -> None:
        """Count a call that has ended."""
        self._calls.labels(call.route, outcome, call.token_source).inc()
        self._seconds.labels(call.route).observe(seconds)
        self._bytes_in.inc(call.bytes_in)
        self._bytes_out.inc(call.bytes_out)
        self._chunks.inc(call.chunks)
        self._tap_lines.inc(len(call.tap_lines))


class _WriterCollector(Collector):
    """Reads the writer's own counts when asked."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Metric]:
        writer = self._writer
        prefix = "ridealong_sidecar_"
        yield CounterMetricFamily(
            prefix + "records_written", "Records in trace shards.", value=writer.written
        )
        yield CounterMetricFamily(
            prefix + "records_lost", "Records that could not be kept.", value=writer.lost
        )
        yield CounterMetricFamily(
            prefix + "write_errors", "Failed attempts to write a shard.", value=writer.errors
        )
        yield GaugeMetricFamily(
            prefix + "queue_bytes", "Records waiting to be written.", value=writer.queued_bytes
        )
        yield GaugeMetricFamily(
            prefix + "degraded",
            "1 while shards can't be written.",
            value=float(writer.failure is not None),
        )
