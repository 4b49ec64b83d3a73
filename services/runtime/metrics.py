"""Metrics: each process counts with prometheus-client; a flat snapshot travels in its heartbeats.

Any tokenizer's /metrics renders the snapshots of all processes, told apart by the labels `role` and `instance`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.runtime.histogram import Histogram, labelled_family
from services.runtime.metric_texts import TEXTS
from services.wire.errors import ProtocolError
from services.wire.members import MemberTelemetry
from services.wire.samples import unpack_samples

PREFIX = "tokenway:"
_SEPARATOR = "\x1f"  # between the parts of a key; no metric name holds it, and label values lose it

LabelledValues: TypeAlias = Mapping[tuple[str, ...], float]
"""A number for each combination of the values of labels."""

logger = logging.getLogger(__name__)


def new_registry() -> CollectorRegistry:
    """A registry without the library's process-wide defaults."""
    return CollectorRegistry(auto_describe=False)


def snapshot(registry: CollectorRegistry) -> dict[str, float]:
    """Every finite sample of a registry by a key of its family's type and name, its own name and its labels.

    `_created` samples are left out, and so is what is not a number (no message may carry NaN or infinity).
    """
    flat: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created") and math.isfinite(sample.value):
                labels = [f"{name}={value.replace(_SEPARATOR, ' ')}" for name, value in sample.labels.items()]
                flat[_SEPARATOR.join([family.type, family.name, sample.name, *labels])] = float(sample.value)
    return flat


def plain_gauges(packed: bytes) -> dict[str, float]:
    """Of a snapshot that came with a heartbeat the gauges without labels, by their names without the prefix.

    None of what is no snapshot; whoever renders the group's metrics warns of it.
    """
    try:
        samples = unpack_samples(packed)
    except ProtocolError:
        return {}
    split = ((key.split(_SEPARATOR), value) for key, value in samples.items())
    return {parts[2].removeprefix(PREFIX): value for parts, value in split if len(parts) == 3 and parts[0] == "gauge"}


def help_of(name: str) -> str:
    """The line of help of a metric; its name when it has none."""
    return TEXTS.get(name.removeprefix(PREFIX), name)


class GroupCollector(Collector):
    """Metric families of every process of the group, from their last heartbeats."""

    def __init__(self) -> None:
        self.members: tuple[MemberTelemetry, ...] = ()
        self._is_warned = False

    def collect(self) -> Iterable[Metric]:
        """One family per name, with the samples of every process. Keys that are not a snapshot's are left out."""
        families: dict[str, Metric] = {}
        for member in self.members:
            who = {"role": str(member.role), "instance": member.instance}
            for key, value in self._samples_of(member):
                try:
                    kind, family_name, sample_name, *labels = key.split(_SEPARATOR)
                    pairs = dict(label.split("=", 1) for label in labels)
                    if family_name not in families:
                        families[family_name] = Metric(family_name, help_of(family_name), kind)
                    family = families[family_name]
                except ValueError:
                    self._warn_once(member, key)
                    continue
                family.add_sample(sample_name, who | pairs, value)
        return families.values()

    def _samples_of(self, member: MemberTelemetry) -> Iterable[tuple[str, float]]:
        try:
            return unpack_samples(member.metrics).items()
        except ProtocolError:
            self._warn_once(member, "")
            return ()

    def _warn_once(self, member: MemberTelemetry, key: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning("%s/%s sent a metric that cannot be shown: %r", member.role, member.instance, key)


def counter(name: str, value: float) -> CounterMetricFamily:
    """A counter by its name in `metric_texts`, without labels."""
    return CounterMetricFamily(PREFIX + name, TEXTS[name], value=value)


def gauge(name: str, value: float) -> GaugeMetricFamily:
    """A gauge by its name in `metric_texts`, without labels."""
    return GaugeMetricFamily(PREFIX + name, TEXTS[name], value=value)


def labelled_counter(name: str, labels: Sequence[str], values: LabelledValues) -> CounterMetricFamily:
    """A counter with a value for each combination of labels."""
    family = CounterMetricFamily(PREFIX + name, TEXTS[name], labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def labelled_gauge(name: str, labels: Sequence[str], values: LabelledValues) -> GaugeMetricFamily:
    """A gauge with a value for each combination of labels."""
    family = GaugeMetricFamily(PREFIX + name, TEXTS[name], labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, values: Histogram) -> HistogramMetricFamily:
    """A histogram without labels."""
    return values.family(PREFIX + name, TEXTS[name])


def labelled_histogram(name: str, label: str, values: Mapping[str, Histogram]) -> HistogramMetricFamily:
    """Histograms that a label tells apart."""
    return labelled_family(PREFIX + name, TEXTS[name], label, values)


def render(*collectors: Collector) -> bytes:
    """The Prometheus text of what they collect."""
    registry = new_registry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)
