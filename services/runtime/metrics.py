"""Metrics: each process counts with prometheus-client; a flat snapshot travels in its heartbeats.

Any tokenizer's /metrics renders the snapshots of all processes, told apart by the labels `role` and `instance`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.wire.messages import MemberTelemetry

PREFIX = "tokenway:"
_SEPARATOR = "\x1f"  # between the parts of a key; no metric name holds it, and label values lose it

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
            for key, value in member.metrics.items():
                try:
                    kind, family_name, sample_name, *labels = key.split(_SEPARATOR)
                    pairs = dict(label.split("=", 1) for label in labels)
                    family = families.setdefault(family_name, Metric(family_name, family_name, kind))
                except ValueError:
                    self._warn_once(member, key)
                    continue
                family.add_sample(sample_name, who | pairs, value)
        return families.values()

    def _warn_once(self, member: MemberTelemetry, key: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            logger.warning("%s/%s sent a metric that cannot be shown: %r", member.role, member.instance, key)


def render(collector: GroupCollector) -> bytes:
    """The Prometheus text of the whole group."""
    registry = new_registry()
    registry.register(collector)
    return generate_latest(registry)
