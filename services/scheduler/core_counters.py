"""scheduler: what a core counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class CoreCounters:
    """What happened so far; these only grow. Times are the worker's own, summed over its steps."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    admitted: int = 0
    retracted: int = 0
    dropped_rows: int = 0
    failed_rows: int = 0
    forward_us: int = 0
    step_us: int = 0

    def count_step(self, forward_us: int, step_us: int, num_tokens: int) -> None:
        """One step ended, which took so long by the worker's clock and computed so many tokens."""
        self.steps += 1
        self.forward_us += forward_us
        self.step_us += step_us
        self.computed_tokens += num_tokens

    def count_admission(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request was admitted, of whose prompt so many tokens are in the prefix cache."""
        self.admitted += 1
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += num_cached_tokens

    def add(self, other: CoreCounters) -> None:
        """Adds what another core counted."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
