"""Requests made of /openapi.json, right ones and wrong ones, each held to what the description says of its answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

AnyOperation: TypeAlias = APIOperation[Any, Any, Any, Any]
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
HANG_S = 60.0
BATCH = 25  # requests of one kind in a row


@dataclass
class Totals:
    """What was answered: statuses by path."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())

    def with_status(self, status: int) -> int:
        return sum(count for (_, found), count in self.statuses.items() if found == status)


def ask_as_described(url: str, num_requests: int, first_seed: int = 0) -> Totals:
    """Sends about so many requests, all routes in turn, as many right as wrong ones.

    An answer that the description does not foresee, a 500, or none within a minute fails.
    """
    description = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations: list[AnyOperation] = []
    for result in description.get_all_operations():
        assert isinstance(result, Ok), result
        operations.append(result.ok())
    totals = Totals()
    rounds = turns(operations, first_seed)
    with requests.Session() as session:
        while totals.num_requests < num_requests:
            operation, mode, number = next(rounds)
            count = min(BATCH, num_requests - totals.num_requests)
            _ask(operation, mode, number, count, totals, session)
    return totals


def turns(operations: list[AnyOperation], first_seed: int) -> Iterator[tuple[AnyOperation, GenerationMode, int]]:
    """Which operation is asked next, how, and the seed; without end. Those for the operator are rarer."""
    number = first_seed
    while True:
        order = [operation for operation in operations for _ in range(1 if "control" in (operation.tags or ()) else 4)]
        random.Random(number).shuffle(order)
        for operation in order:
            modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
            yield operation, modes[number % len(modes)], number
            number += 1


def _ask(
    operation: AnyOperation, mode: GenerationMode, number: int, count: int, totals: Totals, session: requests.Session
) -> None:
    @seed(number)
    @settings(
        max_examples=count if operation.body else 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        response = case.call(session=session, timeout=HANG_S)
        totals.statuses[operation.path, response.status_code] += 1
        assert response.status_code != 500, response.text
        case.validate_response(response, checks=CHECKS)

    ask()
