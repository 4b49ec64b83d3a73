"""What a run came to: rates, times, tokens, failures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.launcher.bench.answers import Answer
from services.launcher.bench.summary import Summary, summarize

_LABEL_WIDTH = 34
_RULE_WIDTH = _LABEL_WIDTH + 14


@dataclass(frozen=True)
class Report:
    """One run. Rates, times and tokens count answers without failure only; the names are those of the JSON file.

    Attributes:
        ttft: from a request to its first text.
        tpot: mean time per token after the first, of answers with more than one token.
        itl: between two events that carry text.
        e2e: from a request to the end of its answer.
    """

    requests: int
    failures: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary

    @classmethod
    def of(cls, answers: Sequence[Answer], duration_s: float) -> Report:
        """Puts the answers of a run together."""
        good = [answer for answer in answers if not answer.failure]
        input_tokens = sum(answer.prompt_tokens for answer in good)
        output_tokens = sum(answer.output_tokens for answer in good)
        return cls(
            requests=len(answers),
            failures=dict(Counter(answer.failure for answer in answers if answer.failure)),
            duration_s=round(duration_s, 3),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_tokens=sum(answer.cached_tokens for answer in good),
            requests_per_s=round(len(good) / duration_s, 3),
            output_tokens_per_s=round(output_tokens / duration_s, 2),
            total_tokens_per_s=round((input_tokens + output_tokens) / duration_s, 2),
            ttft=summarize([answer.first_s for answer in good]),
            tpot=summarize([answer.per_token_s for answer in good if answer.output_tokens > 1]),
            itl=summarize([gap for answer in good for gap in answer.gaps_s]),
            e2e=summarize([answer.total_s for answer in good]),
        )

    @property
    def num_failed(self) -> int:
        """Requests without an answer that is as it must be."""
        return sum(self.failures.values())

    def table(self) -> str:
        """The figures that the load tools of other engines print, under their names."""
        lines = [
            _rule("Serving benchmark", "="),
            _line("Successful requests", str(self.requests - self.num_failed)),
            _line("Failed requests", str(self.num_failed)),
            _line("Duration (s)", f"{self.duration_s:.2f}"),
            _line("Total input tokens", str(self.input_tokens)),
            _line("  of them from the cache", str(self.cached_tokens)),
            _line("Total output tokens", str(self.output_tokens)),
            _line("Request throughput (req/s)", f"{self.requests_per_s:.2f}"),
            _line("Output token throughput (tok/s)", f"{self.output_tokens_per_s:.2f}"),
            _line("Total token throughput (tok/s)", f"{self.total_tokens_per_s:.2f}"),
        ]
        names = {"TTFT": "Time to first token", "TPOT": "Time per output token, without the first",
                 "ITL": "Inter-token latency", "E2E": "End-to-end latency"}  # fmt: skip
        for name, title in names.items():
            times: Summary = getattr(self, name.lower())
            lines.append(_rule(title, "-"))
            figures = {"Mean": times.mean_ms, "Median": times.median_ms, "P99": times.p99_ms}
            lines += [
                _line(f"{kind} {name} (ms)", "-" if times.is_empty else f"{value:.2f}")
                for kind, value in figures.items()
            ]
        return "\n".join([*lines, "=" * _RULE_WIDTH])


def _rule(title: str, mark: str) -> str:
    return f" {title} ".center(_RULE_WIDTH, mark)


def _line(label: str, value: str) -> str:
    return f"{label + ':':{_LABEL_WIDTH}}{value:>{_RULE_WIDTH - _LABEL_WIDTH}}"
