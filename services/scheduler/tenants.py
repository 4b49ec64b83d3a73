"""scheduler: how much each tenant was served, in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class TenantAccount:
    """Tokens computed and produced for a tenant, and its open requests."""

    served_tokens: int
    num_open: int = 0


class TenantShares:
    """How much each tenant with open requests was served.

    A tenant that comes, or comes back, starts at the least served of those present: it can neither claim what it did
    not use while away nor be punished for it.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}

    def enter(self, tenant: str) -> TenantAccount:
        """One more request of the tenant is open; what it gets is to be added to the account."""
        account = self._accounts.get(tenant)
        if account is None:
            least = min((account.served_tokens for account in self._accounts.values()), default=0)
            account = self._accounts[tenant] = TenantAccount(least)
        account.num_open += 1
        return account

    def leave(self, tenant: str) -> None:
        """One of its requests ended; with the last one the tenant is forgotten."""
        account = self._accounts[tenant]
        account.num_open -= 1
        if not account.num_open:
            del self._accounts[tenant]

    def served_tokens(self, tenant: str) -> int:
        """Tokens counted so far for a tenant with open requests."""
        return self._accounts[tenant].served_tokens
