"""/metrics for Prometheus: requests as they come, everything else as it is when somebody looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hermitcrab.gateway.admission import Crowd
from hermitcrab.gateway.contracts import Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metrics:
    """Of one gateway process."""

    def __init__(self) -> None:
        # A second series beside each, which nobody looks at.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "hermitcrab_requests", "Requests by route and status.", ["route", "status"], registry=own
        )
        self._seconds = Histogram(
            "hermitcrab_request_seconds",
            "Time until the whole answer was sent.",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self._counters: dict[tuple[str, int], Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def observed(self, route: str, status: int, seconds: float) -> None:
        # Looking a child up by its labels costs more than counting.
        counter = self._counters.get((route, status))
        if counter is None:
            counter = self._counters[route, status] = self._requests.labels(route, str(status))
        counter.inc()
        histogram = self._histograms.get(route)
        if histogram is None:
            histogram = self._histograms[route] = self._seconds.labels(route)
        histogram.observe(seconds)

    def page(self, statistics: Statistics, crowds: Mapping[str, Crowd], waiting: int) -> bytes:
        polls = _gauge("hermitcrab_waiting", "Long polls, live outputs and terminals.", [], {"": waiting})
        now = CollectorRegistry()
        now.register(_Now([*_of_gateway(statistics), *_of_tenants(crowds), polls]))
        return generate_latest(now) + generate_latest(self._registry)


class _Now(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


def _of_gateway(now: Statistics) -> Iterable[Metric]:
    yield _gauge("hermitcrab_sandboxes", "Sandboxes of this gateway.", ["state"], now.sandboxes)
    yield _gauge("hermitcrab_execs_running", "Commands that run.", [], {"": now.running})
    yield _gauge("hermitcrab_execs_queued", "Commands that wait for a place.", [], {"": now.queued})
    yield _gauge("hermitcrab_nodes", "Gateways on this database that are alive.", [], {"": now.nodes})
    yield _counter("hermitcrab_sandboxes_created", "Sandboxes created.", [], {"": now.created})
    yield _counter(
        "hermitcrab_sandbox_create_seconds", "Time that took, together.", [], {"": now.create_seconds}
    )
    yield _counter("hermitcrab_execs_ended", "Commands that ended.", ["status"], now.execs)
    yield _counter("hermitcrab_exec_seconds", "Time they took, together.", [], {"": now.exec_seconds})
    yield _counter("hermitcrab_output_bytes", "What they printed.", [], {"": now.output_bytes})
    ready = GaugeMetricFamily("hermitcrab_pool_ready", "Warm sandboxes.", labels=["engine", "image"])
    wanted = GaugeMetricFamily("hermitcrab_pool_size", "How many there shall be.", labels=["engine", "image"])
    taken = CounterMetricFamily("hermitcrab_pool_handed_out", "From the pool.", labels=["engine", "image"])
    missed = CounterMetricFamily("hermitcrab_pool_missed", "None was ready.", labels=["engine", "image"])
    for pool in now.pools:
        labels = [pool.engine, pool.image]
        ready.add_metric(labels, pool.ready)
        wanted.add_metric(labels, pool.size)
        taken.add_metric(labels, pool.handed_out)
        missed.add_metric(labels, pool.missed)
    yield from (ready, wanted, taken, missed)


def _of_tenants(crowds: Mapping[str, Crowd]) -> Iterable[Metric]:
    for name, words in (
        ("sandboxes", "Sandboxes of a tenant."),
        ("sandboxes_waiting", "Creates of a tenant that wait for a place."),
        ("execs", "Commands of a tenant that have their place."),
        ("execs_waiting", "Commands of a tenant that wait for one."),
        ("streams", "Open live outputs and terminals of a tenant."),
    ):
        values = {tenant: getattr(crowd, name) for tenant, crowd in crowds.items()}
        yield _gauge(f"hermitcrab_tenant_{name}", words, ["tenant"], values)


def _gauge(name: str, words: str, labels: list[str], values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, words, labels=labels), labels, values)


def _counter(name: str, words: str, labels: list[str], values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, words, labels=labels), labels, values)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], values: Mapping[str, float]
) -> Metric:
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family
