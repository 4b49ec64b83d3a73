"""Tokenizer process: which of the open requests a client's own name means.

A name is the client's business: two requests may have the same one, and it then means both. Owns the names of open
requests only. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_NAME_FIELDS = ("rid", "request_id")
_MAX_CHARACTERS = 256


def names_in(fields: Mapping[str, object]) -> Sequence[str]:
    """The client's own names of a request, of a body that takes them without effect on its answer."""
    values = [fields.get(name) for name in _NAME_FIELDS]
    return [value for value in values if isinstance(value, str) and 0 < len(value) <= _MAX_CHARACTERS]


class RequestNames:
    """The open requests of one process by what their clients call them."""

    def __init__(self) -> None:
        self._group_ids: dict[str, list[bytes]] = {}

    @property
    def num_names(self) -> int:
        """Names of open requests."""
        return len(self._group_ids)

    @contextmanager
    def open(self, names: Sequence[str], group_id: bytes) -> Iterator[None]:
        """While a request is open, each of its names means it."""
        for name in names:
            self._group_ids.setdefault(name, []).append(group_id)
        try:
            yield
        finally:
            for name in names:
                group_ids = self._group_ids[name]
                group_ids.remove(group_id)
                if not group_ids:
                    del self._group_ids[name]

    def find(self, name: str) -> list[bytes]:
        """The ids by which the scheduler knows the requests of a name; empty for an unknown one."""
        return list(self._group_ids.get(name, ()))
