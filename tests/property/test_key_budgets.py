"""Budgets of keys against a naive account that is filled step by step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.api_error import ApiError
from services.tokenizer.key_budgets import KeyBudgets

TENANTS = ("a", "b")


@dataclass
class NaiveAccount:
    """One key's account, filled at every call, with nothing clever."""

    limit: int
    tokens: float
    num_open: int = 0

    def wait(self, seconds: float) -> None:
        self.tokens = min(self.limit, self.tokens + seconds * self.limit / 60)


def refused(budgets: KeyBudgets, tenant: str, now_s: float) -> ApiError | None:
    """Why a request may not come in; None when it did."""
    try:
        budgets.enter(tenant, now_s)
    except ApiError as error:
        return error
    return None


events = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 600).map(lambda tenths: tenths / 10)),
        st.tuples(st.just("enter"), st.sampled_from(TENANTS)),
        st.tuples(st.just("leave"), st.tuples(st.sampled_from(TENANTS), st.integers(0, 500))),
    ),
    max_size=60,
)


@given(st.integers(0, 3), st.sampled_from([0, 1, 60, 600]), events)
def test_who_may_ask_is_decided_as_by_a_naive_account(
    max_requests: int, per_minute: int, steps: list[tuple[str, object]]
) -> None:
    budgets = KeyBudgets(max_requests, per_minute)
    naive = {tenant: NaiveAccount(per_minute, per_minute) for tenant in TENANTS}
    now_s = 1000.0
    for kind, argument in steps:
        if kind == "wait":
            assert isinstance(argument, float)
            now_s += argument
            for account in naive.values():
                account.wait(argument)
        elif kind == "enter":
            assert isinstance(argument, str)
            account = naive[argument]
            is_full = bool(max_requests) and account.num_open >= max_requests
            if bool(per_minute) and abs(account.tokens) < 1e-6:
                continue  # on the edge the two may round differently
            is_poor = bool(per_minute) and account.tokens <= 0
            refusal = refused(budgets, argument, now_s)
            if is_full or is_poor:
                assert refusal is not None
                assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
                assert refusal.retry_after_s >= 1
            else:
                assert refusal is None
                account.num_open += 1
        else:
            assert isinstance(argument, tuple)
            tenant, num_tokens = argument
            if naive[tenant].num_open:
                naive[tenant].num_open -= 1
                naive[tenant].tokens -= num_tokens
                budgets.leave(tenant, num_tokens, now_s)


@given(st.integers(1, 10_000), st.integers(1, 100_000))
def test_after_the_time_that_was_told_the_key_may_ask_again(per_minute: int, spent: int) -> None:
    budgets = KeyBudgets(0, per_minute)
    budgets.enter("a", 0.0)
    budgets.leave("a", per_minute + spent, 0.0)
    with pytest.raises(ApiError) as refused:
        budgets.enter("a", 0.0)
    budgets.enter("b", 0.0)  # it concerns nobody else
    budgets.enter("a", refused.value.retry_after_s + 0.001)


def test_accounts_that_owe_nothing_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tokenizer.key_budgets._MAX_ACCOUNTS", 10)
    budgets = KeyBudgets(1, 60)
    budgets.enter("open", 0.0)
    budgets.enter("debtor", 0.0)
    budgets.leave("debtor", 1000, 0.0)
    for number in range(100):
        budgets.enter(f"t{number}", float(number))
        budgets.leave(f"t{number}", 1, float(number))
    assert len(budgets._accounts) < 70  # those of the last minute
    for tenant in ("open", "debtor"):
        with pytest.raises(ApiError):
            budgets.enter(tenant, 100.0)


def test_without_limits_nothing_is_set() -> None:
    assert not KeyBudgets(0, 0).are_set
    assert KeyBudgets(1, 0).are_set
    assert KeyBudgets(0, 1).are_set
