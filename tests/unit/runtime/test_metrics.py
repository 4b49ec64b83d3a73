"""Metrics travel through heartbeats and come out of /metrics with the values that they had."""

from __future__ import annotations

import logging
import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from services.runtime.metrics import PREFIX, GroupCollector, new_registry, render, snapshot
from services.wire.codec import decode, encode
from services.wire.members import Heartbeat, MemberTelemetry, Role, State
from services.wire.samples import pack_samples, unpack_samples

ODD_LABEL = 'a=b;c\\d"e\n世界 👋'


def filled_registry(factor: float) -> CollectorRegistry:
    registry = new_registry()
    Gauge(f"{PREFIX}queue", "Depth.", registry=registry).set(3 * factor)
    counter = Counter(f"{PREFIX}tokens", "Tokens.", ["model", "kind"], registry=registry)
    counter.labels(ODD_LABEL, "prompt").inc(10 * factor)
    counter.labels("m", "output").inc(2**53 * factor)
    histogram = Histogram(f"{PREFIX}step_seconds", "Steps.", ["phase"], buckets=(0.01, 0.1, 1), registry=registry)
    for seconds in (0.005, 0.05, 0.05, 5):
        histogram.labels("decode").observe(seconds * factor)
    return registry


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def member(role: Role, instance: str, metrics: dict[str, float]) -> MemberTelemetry:
    return MemberTelemetry(role, instance, 1, State.READY, 5, 6, pack_samples(metrics), 3000)


def through_a_heartbeat(metrics: dict[str, float]) -> dict[str, float]:
    heartbeat = decode(encode(Heartbeat(1, State.READY, 0, pack_samples(metrics))))
    assert isinstance(heartbeat, Heartbeat)
    return unpack_samples(heartbeat.metrics)


def test_values_of_every_process_come_out_as_they_went_in() -> None:
    registries = {("scheduler", "s"): filled_registry(1), ("tokenizer", "t-1"): filled_registry(2)}
    collector = GroupCollector()
    collector.members = tuple(
        member(Role(role), instance, through_a_heartbeat(snapshot(registry)))
        for (role, instance), registry in registries.items()
    )
    expected = {
        (sample.name, frozenset({**sample.labels, "role": role, "instance": instance}.items())): sample.value
        for (role, instance), registry in registries.items()
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples(render(collector).decode()) == expected
    assert len(expected) == 2 * (1 + 2 + 6)


def test_types_of_families_are_kept() -> None:
    collector = GroupCollector()
    collector.members = (member(Role.SCHEDULER, "s", snapshot(filled_registry(1))),)
    types = {family.name: family.type for family in text_string_to_metric_families(render(collector).decode())}
    assert types == {f"{PREFIX}queue": "gauge", f"{PREFIX}tokens": "counter", f"{PREFIX}step_seconds": "histogram"}


def test_what_is_not_a_number_is_not_sent() -> None:
    registry = new_registry()
    gauge = Gauge(f"{PREFIX}rate", "Rate.", ["of"], registry=registry)
    for name, value in (("a", 1.0), ("b", math.nan), ("c", math.inf), ("d", -math.inf)):
        gauge.labels(name).set(value)
    assert list(through_a_heartbeat(snapshot(registry)).values()) == [1.0]


def test_keys_that_are_no_snapshots_are_left_out_and_the_rest_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    good = snapshot(filled_registry(1))
    bad = {"": 1.0, "x": 1.0, "nonsense\x1fa\x1fb": 1.0, "gauge\x1fa\x1fa\x1flabel": 1.0}
    collector = GroupCollector()
    broken = MemberTelemetry(Role.TOKENIZER, "t", 1, State.READY, 5, 6, b"\x81", 3000)
    collector.members = (member(Role.SCHEDULER, "s", bad), broken, member(Role.SCHEDULER, "s", good))
    with caplog.at_level(logging.WARNING):
        text = render(collector).decode()
        render(collector)
    assert len(samples(text)) == len(good)
    assert len(caplog.records) == 1


def test_an_empty_group_renders_nothing() -> None:
    assert render(GroupCollector()) == b""
