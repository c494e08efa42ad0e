"""Metrics in Prometheus' text format. The only module that knows prometheus_client; nothing here is on the hot path."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from seedrl.metrics import Declaration, Group, Histogram, Kind, Metric, metrics_of

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Exposition(Collector):
    """Renders some groups, and what the system knows of this process. `refresh` is called before every scrape."""

    def __init__(self, *groups: Group, refresh: Callable[[], None] = lambda: None) -> None:
        self._groups = groups
        self._refresh = refresh
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        self._refresh()
        for group in self._groups:
            yield from map(family_of, metrics_of(group))


def family_of(metric: Metric) -> Family:
    name, declaration, value = metric
    labels = [declaration.label] if declaration.label else []
    if declaration.kind is Kind.info:
        return InfoMetricFamily(name.removesuffix("_info"), declaration.meaning, value=value)
    if declaration.kind is Kind.histogram:
        return _histogram(name, declaration, value)
    kind = CounterMetricFamily if declaration.kind is Kind.counter else GaugeMetricFamily
    family = kind(name, declaration.meaning, labels=labels)
    for label, number in (value if labels else {"": value}).items():
        family.add_metric([label] if labels else [], number)
    return family


def _histogram(name: str, declaration: Declaration, value: Histogram) -> Family:
    """Build the family by hand: prometheus_client omits sum and count if a bound is negative, as for returns."""
    family = HistogramMetricFamily(name, declaration.meaning)
    counts = list(accumulate(value.counts))
    for bound, count in zip([f"{bound:g}" for bound in value.bounds] + ["+Inf"], counts, strict=True):
        family.add_sample(f"{name}_bucket", {"le": bound}, count)
    family.add_sample(f"{name}_count", {}, counts[-1])
    family.add_sample(f"{name}_sum", {}, value.sum)
    return family
