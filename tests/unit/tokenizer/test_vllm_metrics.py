"""vLLM's names for our metrics: the table, what it adds up, and that every source is a metric of ours."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.runtime.histogram import Histogram
from services.runtime.metric_texts import TEXTS
from services.runtime.metrics import (
    GroupCollector,
    counter,
    gauge,
    histogram,
    labelled_counter,
    labelled_histogram,
    new_registry,
    render,
    snapshot,
)
from services.tokenizer.vllm_metrics import NAMES, USAGE_NAMES, VLLM_PREFIX, VllmCollector
from services.wire.members import MemberTelemetry, Role, State
from services.wire.samples import pack_samples

# The samples that vLLM 0.10 exposes and its example dashboard asks for, by their full names.
ASKED_FOR = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
}


class Fixed:
    """A collector of families that are handed in."""

    def __init__(self, *families: object) -> None:
        self._families = families

    def collect(self) -> tuple[object, ...]:
        return self._families


def filled(*values: float) -> Histogram:
    found = Histogram((0.1, 1.0))
    for value in values:
        found.observe(value)
    return found


def member(role: Role, instance: str, *families: object) -> MemberTelemetry:
    registry = new_registry()
    registry.register(Fixed(*families))  # type: ignore[arg-type]  # a collector is what has this method
    return MemberTelemetry(role, instance, 1, State.READY, 0, 0, pack_samples(snapshot(registry)), 3000)


def tokenizer(instance: str, factor: int) -> MemberTelemetry:
    plain = [
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_seconds", "request_inference_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_generation_tokens",
    ]  # fmt: skip
    return member(
        Role.TOKENIZER,
        instance,
        counter("prompt_tokens", 10 * factor),
        counter("generation_tokens", 20 * factor),
        labelled_counter("finished_answers", ["reason"], {("stop",): 3 * factor, ("length",): 1}),
        labelled_histogram(
            "hop_seconds", "hop", {"prefill": filled(0.5 * factor), "decode": filled(7), "http": filled()}
        ),
        *(histogram(name, filled(0.05, 5 * factor)) for name in plain),
    )


@pytest.fixture
def samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What is exported for a group of a scheduler and two tokenizers, without the labels that all have."""
    group = GroupCollector()
    scheduler = member(
        Role.SCHEDULER,
        "s",
        gauge("scheduler_num_requests_running", 4),
        gauge("scheduler_num_requests_waiting", 5),
        gauge("scheduler_kv_pages", 100),
        gauge("scheduler_kv_pages_free", 25),
        gauge("scheduler_kv_pages_cached", 15),
        counter("scheduler_retracted", 2),
        counter("scheduler_prompt_tokens", 50),
        counter("scheduler_cached_tokens", 30),
        histogram("scheduler_step_tokens", filled(0.5)),
    )
    group.members = (scheduler, tokenizer("0", 1), tokenizer("1", 2))
    found = {}
    for family in text_string_to_metric_families(render(group, VllmCollector(group, 'a "model"')).decode()):
        for sample in family.samples:
            if sample.name.startswith(VLLM_PREFIX):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ('a "model"', "0")
                assert not {"role", "instance"} & set(labels)
                found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_every_sample_that_vllm_s_dashboards_ask_for_is_there(
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float],
) -> None:
    assert {name for name, _ in samples} >= ASKED_FOR


def test_processes_are_added_up_and_labels_renamed(
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float],
) -> None:
    assert value(samples, "vllm:prompt_tokens_total") == 30
    assert value(samples, "vllm:generation_tokens_total") == 60
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 9
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 2
    assert value(samples, "vllm:num_requests_running") == 4
    assert value(samples, "vllm:num_preemptions_total") == 2
    assert value(samples, "vllm:kv_cache_usage_perc") == pytest.approx(0.6)
    assert value(samples, "vllm:request_prefill_time_seconds_sum") == 1.5
    assert value(samples, "vllm:request_prefill_time_seconds_count") == 2
    assert value(samples, "vllm:request_decode_time_seconds_bucket", le="+Inf") == 2
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 2
    assert value(samples, "vllm:time_to_first_token_seconds_sum") == pytest.approx(15.1)


def test_every_name_has_a_metric_of_ours_behind_it() -> None:
    assert {renamed.ours for renamed in NAMES.values()} <= set(TEXTS)
    assert not set(USAGE_NAMES) & set(NAMES)


def test_a_group_that_has_told_nothing_yet_gives_nothing() -> None:
    group = GroupCollector()
    assert list(VllmCollector(group, "m").collect()) == []
