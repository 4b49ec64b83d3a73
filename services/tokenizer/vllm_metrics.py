"""Tokenizer process: the group's metrics under vLLM's names, for dashboards and autoscalers made for it.

A table of names. What several processes count is added up; each sample has vLLM's labels `model_name` and `engine`
instead of our `role` and `instance`. What vLLM knows and this server does not is not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.metrics import PREFIX, GroupCollector

VLLM_PREFIX = "vllm:"
_ENGINE = "0"
_WHO = frozenset({"role", "instance"})


@dataclass(frozen=True)
class Renamed:
    """One of our families under another name.

    Attributes:
        ours: Its name here, without the prefix.
        where: Only samples with these labels, which are then left out.
        labels: Labels with another name there.
    """

    ours: str
    where: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


NAMES: Mapping[str, Renamed] = {
    "num_requests_running": Renamed("scheduler_num_requests_running"),
    "num_requests_waiting": Renamed("scheduler_num_requests_waiting"),
    "num_preemptions": Renamed("scheduler_retracted"),
    "prefix_cache_queries": Renamed("scheduler_prompt_tokens"),
    "prefix_cache_hits": Renamed("scheduler_cached_tokens"),
    "prompt_tokens": Renamed("prompt_tokens"),
    "generation_tokens": Renamed("generation_tokens"),
    "request_success": Renamed("finished_answers", labels={"reason": "finished_reason"}),
    "iteration_tokens_total": Renamed("scheduler_step_tokens"),
    "time_to_first_token_seconds": Renamed("time_to_first_token_seconds"),
    "time_per_output_token_seconds": Renamed("inter_token_latency_seconds"),
    "inter_token_latency_seconds": Renamed("inter_token_latency_seconds"),
    "request_time_per_output_token_seconds": Renamed("request_time_per_output_token_seconds"),
    "e2e_request_latency_seconds": Renamed("e2e_request_latency_seconds"),
    "request_queue_time_seconds": Renamed("request_queue_seconds"),
    "request_inference_time_seconds": Renamed("request_inference_seconds"),
    "request_prefill_time_seconds": Renamed("hop_seconds", where={"hop": "prefill"}),
    "request_decode_time_seconds": Renamed("hop_seconds", where={"hop": "decode"}),
    "request_prompt_tokens": Renamed("request_prompt_tokens"),
    "request_generation_tokens": Renamed("request_generation_tokens"),
    "request_max_num_generation_tokens": Renamed("request_max_generation_tokens"),
}
USAGE_NAMES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""Gauges of the share of KV pages that requests hold, 0 to 1: the newer name and the older one."""

_Labels = tuple[tuple[str, str], ...]


class VllmCollector(Collector):
    """Renames what a group's collector gives."""

    def __init__(self, group: GroupCollector, model: str) -> None:
        """`model` is the served name."""
        self._group = group
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """One family for each name of which we know something."""
        ours = {family.name.removeprefix(PREFIX): family for family in self._group.collect()}
        for name, renamed in NAMES.items():
            if renamed.ours in ours:
                yield self._renamed(name, renamed, ours[renamed.ours])
        pages = _total(ours, "scheduler_kv_pages")
        if pages:
            unused = _total(ours, "scheduler_kv_pages_free") + _total(ours, "scheduler_kv_pages_cached")
            for name in USAGE_NAMES:
                family = Metric(VLLM_PREFIX + name, "share of the KV pages that requests hold, 0 to 1", "gauge")
                family.add_sample(family.name, self._who({}), 1 - unused / pages)
                yield family

    def _renamed(self, name: str, renamed: Renamed, family: Metric) -> Metric:
        sums: dict[tuple[str, _Labels], float] = defaultdict(float)
        for sample in family.samples:
            if all(sample.labels.get(label) == value for label, value in renamed.where.items()):
                labels = tuple(
                    (renamed.labels.get(label, label), value)
                    for label, value in sample.labels.items()
                    if label not in _WHO and label not in renamed.where
                )
                sums[sample.name.removeprefix(family.name), labels] += sample.value
        found = Metric(VLLM_PREFIX + name, family.documentation, family.type)
        for (ending, labels), value in sums.items():
            found.add_sample(found.name + ending, self._who(dict(labels)), value)
        return found

    def _who(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {"engine": _ENGINE, "model_name": self._model, **labels}


def _total(families: Mapping[str, Metric], name: str) -> float:
    return sum(sample.value for sample in families[name].samples) if name in families else 0.0
