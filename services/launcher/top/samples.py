"""The numbers of a group, from the text of /metrics; and what came between two such texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from services.launcher.errors import CommandError
from services.runtime.metrics import PREFIX

Labels = tuple[tuple[str, str], ...]


class Samples:
    """One text. Names are without the prefix; counters have their ending."""

    def __init__(self, text: str) -> None:
        """Reads it.

        Raises:
            CommandError: it is not the Prometheus text of one of our servers.
        """
        self._values: dict[str, dict[Labels, float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith(PREFIX) and not sample.name.endswith("_bucket"):
                        labels = tuple(sorted(sample.labels.items()))
                        self._values.setdefault(sample.name.removeprefix(PREFIX), {})[labels] = float(sample.value)
        except ValueError as error:
            raise CommandError(f"the server's metrics are not understood: {error}") from None
        if "scheduler_num_requests_running" not in self._values:
            raise CommandError("the server's metrics are none of Tokenway's")

    def of(self, name: str) -> Mapping[Labels, float]:
        """All samples of a name by their labels; empty where there are none."""
        return self._values.get(name, {})

    def total(self, name: str, **labels: str) -> float:
        """The sum over all processes of those that have these labels."""
        return sum(value for having, value in self.of(name).items() if _has(having, labels))

    def instances(self, name: str) -> int:
        """How many processes tell a number of this name."""
        return len({dict(labels).get("instance") for labels in self.of(name)})


@dataclass(frozen=True)
class Window:
    """What came between two texts; without a first one, since the processes began.

    Attributes:
        samples: the later ones.
        before: the earlier ones.
        seconds: between them; None where there is no first one.
    """

    samples: Samples
    before: Samples | None = None
    seconds: float | None = None

    def growth(self, name: str, **labels: str) -> float:
        """How much a counter grew, over all processes. One that is smaller than it was has been started anew."""
        earlier: Mapping[Labels, float] = {} if self.before is None else self.before.of(name)
        grown = 0.0
        for having, value in self.samples.of(name).items():
            if _has(having, labels):
                past = earlier.get(having, 0.0)
                grown += value - past if value >= past else value
        return grown


def _has(labels: Labels, wanted: Mapping[str, str]) -> bool:
    return not wanted or wanted.items() <= dict(labels).items()
