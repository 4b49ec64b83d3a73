"""Tokenizer process: how much one key may ask for: requests at a time, tokens in a minute.

Tokens are paid when a request has ended, because nobody knows before how long its answer gets: a key whose account is
below zero is refused until it has been refilled. The account holds one minute's tokens at most. Pure: the caller brings
the clock. Budgets are those of one tokenizer process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.tokenizer.api_error import ApiError, Code

_MINUTE_S = 60.0
_MAX_ACCOUNTS = 65536


@dataclass(slots=True)
class _Account:
    num_open: int = 0
    tokens: float = 0.0
    filled_s: float = 0.0


class KeyBudgets:
    """The account of every key that has asked lately. A limit of 0 is none."""

    def __init__(self, max_requests: int, tokens_per_minute: int) -> None:
        self._max_requests = max_requests
        self._tokens_per_minute = tokens_per_minute
        self._accounts: dict[str, _Account] = {}

    @property
    def are_set(self) -> bool:
        """Whether there is any limit at all."""
        return bool(self._max_requests or self._tokens_per_minute)

    def enter(self, tenant: str, now_s: float) -> None:
        """One more request of a key is being answered; `leave` must follow.

        Raises:
            ApiError: 429 with Retry-After: the key has used up what it may.
        """
        account = self._account(tenant, now_s)
        if self._max_requests and account.num_open >= self._max_requests:
            message = f"{account.num_open} requests of this key are being answered, at most {self._max_requests} may be"
            raise _over_budget(message, 1)
        if self._tokens_per_minute and account.tokens <= 0:
            missing_s = (1 - account.tokens) * _MINUTE_S / self._tokens_per_minute
            message = f"this key has used its {self._tokens_per_minute} tokens a minute"
            raise _over_budget(message, max(1, math.ceil(missing_s)))
        account.num_open += 1

    def leave(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """A request that had entered has ended and has used so many tokens, of its prompts and its answers."""
        account = self._account(tenant, now_s)
        account.num_open -= 1
        account.tokens -= num_tokens

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_full(now_s)
            account = self._accounts[tenant] = _Account(tokens=self._tokens_per_minute, filled_s=now_s)
        self._fill(account, now_s)
        return account

    def _fill(self, account: _Account, now_s: float) -> None:
        earned = (now_s - account.filled_s) * self._tokens_per_minute / _MINUTE_S
        account.tokens = min(float(self._tokens_per_minute), account.tokens + earned)
        account.filled_s = now_s

    def _forget_full(self, now_s: float) -> None:
        """Keeps the table small: an account that is full and has nothing open is as good as a new one."""
        if len(self._accounts) < _MAX_ACCOUNTS:
            return
        for account in self._accounts.values():
            self._fill(account, now_s)
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_open or account.tokens < self._tokens_per_minute
        }


def _over_budget(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, code=Code.RATE_LIMIT_EXCEEDED, retry_after_s=retry_after_s)
