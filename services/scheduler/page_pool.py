"""scheduler: the pool of KV page ids.

It owns which page ids are free, and nothing else: a page that is not free belongs to whoever was handed it (a request's
page table or the radix cache). It knows no tensor, no request and no page size, and must never hand out a page twice.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids [0, num_pages), each free or handed out.

    Args:
        num_pages: size of the worker's KV pool in pages, >= 1.

    Raises:
        ValueError: the pool would be empty.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 goes first, a page just freed goes next
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hands out exactly `num_pages` pages (>= 0), or None when fewer are free: never a part of them.

        Raises:
            ValueError: a negative count, the caller's fault.
        """
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        first = len(self._free) - num_pages
        if first < 0:
            return None
        pages = self._free[first:]
        del self._free[first:]
        for page in pages:
            self._is_free[page] = 0
        pages.reverse()
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back.

        Raises:
            ValueError: a page is free already or no page of this pool: the ledger is broken, and going on would hand
                the same memory to two requests.
        """
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is outside the pool of {self.num_pages}")
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> frozenset[int]:
        """The free page ids, for invariants and tests."""
        return frozenset(self._free)
