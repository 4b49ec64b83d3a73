"""scheduler: the answers of one request with n > 1, which wait until the first one's prompt is in the tree.

Without this, all n would compute the same prompt at once, each into pages of its own.
"""

from __future__ import annotations

from services.scheduler.kv_ledger import KvLedger
from services.scheduler.request import Request, RequestState


class Siblings:
    """Held requests, by the one whose prompt they wait for (their leader)."""

    def __init__(self) -> None:
        self._by_leader: dict[bytes, dict[bytes, Request]] = {}
        self._leader_of: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def __contains__(self, request: Request) -> bool:
        leader_id = self._leader_of.get(request.request_id)
        return leader_id is not None and self._by_leader[leader_id][request.request_id] is request

    def hold(self, request: Request, leader: Request) -> None:
        """Lets a request wait for its leader."""
        self._by_leader.setdefault(leader.request_id, {})[request.request_id] = request
        self._leader_of[request.request_id] = leader.request_id

    def remove(self, request: Request) -> None:
        """Takes a held request out; KeyError when it is not held."""
        leader_id = self._leader_of.pop(request.request_id)
        held = self._by_leader[leader_id]
        del held[request.request_id]
        if not held:
            del self._by_leader[leader_id]

    def waiting_for(self, leader: Request) -> list[Request]:
        """Those that wait for `leader`, in order of arrival."""
        return list(self._by_leader.get(leader.request_id, {}).values())


def leader_of(request: Request, first: Request | None, ledger: KvLedger) -> Request | None:
    """The sibling whose prompt a new request should wait for, if that helps; `first`: the first of its group."""
    if first is None or first is request or first.is_published or first.state is RequestState.HELD:
        return None
    is_same = request.submit.prompt_token_ids == first.submit.prompt_token_ids
    return first if is_same and ledger.could_share(request) else None
