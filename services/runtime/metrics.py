"""Metrics: each process counts with prometheus-client; a flat snapshot travels in its heartbeats.

Any tokenizer's /metrics renders its own registry and the snapshots of all the others, told apart by the labels `role`
and `instance`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.wire.messages import MemberTelemetry

PREFIX = "tokenway:"
_LABEL_SEPARATOR = ";"


def new_registry() -> CollectorRegistry:
    """A registry without the library's process-wide defaults."""
    return CollectorRegistry(auto_describe=False)


def snapshot(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample of a registry: "type;family;sample;label=value;..." -> value. `_created` samples are left out."""
    flat: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = [f"{name}={value}" for name, value in sample.labels.items()]
                flat[_LABEL_SEPARATOR.join([family.type, family.name, sample.name, *labels])] = float(sample.value)
    return flat


class GroupCollector(Collector):
    """Metric families of every process of the group, from their last heartbeats."""

    def __init__(self) -> None:
        self.members: tuple[MemberTelemetry, ...] = ()

    def collect(self) -> Iterable[Metric]:
        """One family per name, a sample per process."""
        families: dict[str, Metric] = {}
        for member in self.members:
            who = {"role": str(member.role), "instance": member.instance}
            for key, value in member.metrics.items():
                kind, family_name, sample_name, *labels = key.split(_LABEL_SEPARATOR)
                family = families.setdefault(family_name, Metric(family_name, family_name, kind))
                family.add_sample(sample_name, who | dict(label.split("=", 1) for label in labels), value)
        return families.values()


def render(collector: GroupCollector) -> bytes:
    """The Prometheus text of the whole group."""
    registry = new_registry()
    registry.register(collector)
    return generate_latest(registry)
