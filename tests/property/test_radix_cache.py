"""RadixCache against a naive reference: a dictionary with one entry for each cached page, always scanned in full."""

from __future__ import annotations

import itertools
import sys
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.radix_cache import Node, RadixCache


def key_of(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@dataclass
class NaivePage:
    page: int
    last_used: int
    num_locks: int = 0


class NaiveCache:
    """Each cached page under its whole path of tokens; nothing is compressed, everything is searched."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.entries: dict[tuple[bytes, tuple[int, ...]], NaivePage] = {}
        self.tick = 0

    def prefixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:end]) for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def match(self, root: bytes, ids: list[int]) -> list[int]:
        self.tick += 1
        found = itertools.takewhile(lambda path: (root, path) in self.entries, self.prefixes(ids))
        entries = [self.entries[root, path] for path in found]
        for entry in entries:
            entry.last_used = self.tick
        return [entry.page for entry in entries]

    def insert(self, root: bytes, ids: list[int], pages: list[int]) -> list[int]:
        self.tick += 1
        rejected = []
        paths = self.prefixes(ids)
        for path, page in zip(paths, pages, strict=False):
            entry = self.entries.setdefault((root, path), NaivePage(page, self.tick))
            entry.last_used = self.tick
            if entry.page != page:
                rejected.append(page)
        return rejected + pages[len(paths) :]

    def lock(self, root: bytes, ids: list[int], change: int) -> None:
        for path in self.prefixes(ids):
            self.entries[root, path].num_locks += change

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages:
            inner = {(root, path[: -self.page_size]) for root, path in self.entries}
            leaves = [at for at, entry in self.entries.items() if at not in inner and not entry.num_locks]
            if not leaves:
                break
            oldest = min(leaves, key=lambda at: self.entries[at].last_used)
            freed.append(self.entries.pop(oldest).page)
        return freed


class RadixMachine(RuleBasedStateMachine):
    """Any order of match, insert, lock, unlock, evict and flush, over a small alphabet so that prefixes are shared."""

    roots = st.sampled_from([b"", b"salt"])
    ids = st.lists(st.integers(0, 2), max_size=14)

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(page_size)
        self.naive = NaiveCache(page_size)
        self.next_page = 0
        self.held: list[tuple[Node | None, bytes, list[int]]] = []

    @rule(root=roots, ids=ids, is_held=st.booleans())
    def match(self, root: bytes, ids: list[int], is_held: bool) -> None:
        num_peeked = self.cache.peek(root, key_of(ids))
        match = self.cache.match(root, key_of(ids))
        expected = self.naive.match(root, ids)
        assert match.pages == expected
        assert num_peeked == len(expected) * self.page_size
        assert (match.node is None) == (not expected)
        if is_held:
            prefix = ids[: len(expected) * self.page_size]
            self.cache.lock(match.node)
            self.naive.lock(root, prefix, 1)
            self.held.append((match.node, root, prefix))

    @rule(root=roots, ids=ids, is_held=st.booleans())
    def insert(self, root: bytes, ids: list[int], is_held: bool) -> None:
        pages = list(range(self.next_page, self.next_page - (-len(ids) // self.page_size)))
        self.next_page += len(pages)
        insertion = self.cache.insert(root, key_of(ids), pages)
        assert insertion.rejected == self.naive.insert(root, ids, pages)
        assert (insertion.node is None) == (len(ids) < self.page_size)
        if is_held:
            prefix = ids[: len(ids) // self.page_size * self.page_size]
            self.cache.lock(insertion.node)
            self.naive.lock(root, prefix, 1)
            self.held.append((insertion.node, root, prefix))

    @rule(root=roots, ids=ids)
    def insert_again_what_is_there(self, root: bytes, ids: list[int]) -> None:
        pages = self.cache.match(root, key_of(ids)).pages
        assert self.naive.match(root, ids) == pages
        assert self.cache.insert(root, key_of(ids[: len(pages) * self.page_size]), pages).rejected == []
        assert self.naive.insert(root, ids[: len(pages) * self.page_size], pages) == []

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 1000))
    def unlock(self, choice: int) -> None:
        node, root, prefix = self.held.pop(choice % len(self.held))
        self.cache.unlock(node)
        self.naive.lock(root, prefix, -1)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        assert self.cache.evict(num_pages) == self.naive.evict(num_pages)

    @rule()
    def flush(self) -> None:
        assert sorted(self.cache.flush()) == sorted(self.naive.evict(10**9))

    @invariant()
    def agrees(self) -> None:
        entries = self.naive.entries.values()
        assert self.cache.num_pages == len(entries)
        assert self.cache.num_locked_pages == sum(entry.num_locks > 0 for entry in entries)
        pages = [page for node in self.cache.nodes() for page in node.pages]
        assert sorted(pages) == sorted(entry.page for entry in entries)
        for node in self.cache.nodes():
            assert node.pages
            assert len(node.key) == 4 * self.page_size * len(node.pages)
            assert all(child.parent is node for child in node.children.values())
            assert node.num_locks >= max((child.num_locks for child in node.children.values()), default=0)


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_tree_deeper_than_the_recursion_limit_works() -> None:
    cache = RadixCache(1)
    ids = list(range(2 * sys.getrecursionlimit()))
    nodes = []
    for end in range(1, len(ids) + 1):
        node = cache.insert(b"", key_of(ids[:end]), list(range(end))).node
        cache.lock(node)  # a holder on every level keeps the edges apart
        nodes.append(node)
    assert len(list(cache.nodes())) == len(ids)
    assert cache.match(b"", key_of(ids)).pages == ids
    for node in nodes:
        cache.unlock(node)
    assert cache.flush() == ids[::-1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_empty_namespaces_leave_nothing_behind(page_size: int) -> None:
    cache = RadixCache(page_size)
    for salt in range(100):
        name = str(salt).encode()
        cache.match(name, key_of([1, 2, 3]))
        cache.insert(name, key_of(list(range(page_size))), [salt])
    assert len(cache.flush()) == 100
    assert not cache._roots
