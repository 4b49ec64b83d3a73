"""The cheap histogram against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from services.runtime.histogram import Histogram

BOUNDS = (0.1, 1, 2.5, 10)


@given(st.lists(st.floats(0, 20) | st.sampled_from(BOUNDS)))
def test_buckets_are_cumulative_and_inclusive(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    family: Metric = histogram.family("x", "help")
    samples = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for bound in BOUNDS:
        assert samples[str(float(bound))] == sum(value <= bound for value in values)
    assert samples["+Inf"] == samples["x_count"] == len(values)
    assert samples["x_sum"] == pytest.approx(sum(values))
