"""scheduler: the radix cache, a tree of token runs whose KV pages can be used again.

It owns the page ids that lie in the tree until `evict` gives them back. It must never look at a clock (recency is a
counter), recurse (a tree can be as deep as a conversation is long) or change a page that is shared.

    namespace b"": [1 2 3 4] pages 7,2 --+-- [5 6] page 9        page_size 2: edges are whole pages
                                         +-- [8 8 8 8] pages 1,3

Keys are little-endian int32 token ids as bytes: an edge is compared by one memcmp, a child is found by the bytes of its
first page. Keys hold the token ids themselves, never a hash that a client could make collide. The idea of a tree over
prompts is that of SGLang's RadixAttention (Zheng et al. 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Node:
    """One edge and the node that it leads to: `key` is the edge's tokens, `pages` where their KV lies, page by page.

    All pages of a node were last used at the same tick: a match that ends inside an edge splits it. `num_locks` counts
    the holders of this node and of all nodes below it, so an unlocked node has no locked descendant.
    """

    parent: Node | None
    key: bytes
    pages: list[int]
    namespace: bytes
    last_used: int = 0
    num_locks: int = 0
    is_queued: bool = False
    children: dict[bytes, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: the node where it ends (None when nothing matched) and its pages in order."""

    node: Node | None
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of inserted pages.

    `node` is where the key now ends (None when it is shorter than a page), `rejected` the pages that the tree did not
    take because it holds others for the same tokens, or because they are not full.
    """

    node: Node | None
    rejected: list[int]


class RadixCache:
    """Prefix tree at page granularity, one root per namespace (adapter and cache salt).

    Args:
        page_size: tokens in a page, >= 1.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page size {page_size}")
        self.page_size = page_size
        self.version = 0  # rises with every change of content: a peek stays true while it stands
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._tick = 0
        self._num_pages = 0
        self._num_locked_pages = 0
        self._queue: list[tuple[int, int, Node]] = []  # leaves to evict, by a tick that may lag behind `last_used`
        self._num_queued = 0

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    @property
    def num_locked_pages(self) -> int:
        """Pages in the tree that a holder needs."""
        return self._num_locked_pages

    @property
    def num_evictable_pages(self) -> int:
        """Pages that `evict` can give back now."""
        return self._num_pages - self._num_locked_pages

    def usable_tokens(self, num_tokens: int) -> int:
        """How much of `num_tokens` known tokens a cached prefix may cover: whole pages, never the last token."""
        return max(num_tokens - 1, 0) // self.page_size * self.page_size

    def peek(self, namespace: bytes, key: bytes) -> int:
        """Tokens of `key` that are cached; touches nothing."""
        _, num_bytes, _, partial_bytes = self._walk(namespace, key)
        return (num_bytes + partial_bytes) // TOKEN_BYTES

    def match(self, namespace: bytes, key: bytes) -> Match:
        """Finds the longest cached prefix of `key` in whole pages and marks it as just used.

        The pages stay the tree's: lock the node before anything can evict them.
        """
        node, _, partial, partial_bytes = self._walk(namespace, key)
        if partial is not None:
            node = self._split(partial, partial_bytes)
        return self._touch(node)

    def insert(self, namespace: bytes, key: bytes, pages: list[int]) -> Insertion:
        """Gives the KV of `key` to the tree. Tokens beyond the last full page do not enter.

        Args:
            namespace: root to insert under.
            key: token ids, any number.
            pages: their pages in order, ceil(num_tokens / page_size) of them.

        Returns:
            Where the key ends, and the given pages that stay the caller's. A given page that the tree holds already at
            that place is neither taken nor rejected.

        Raises:
            ValueError: the pages do not cover the key.
        """
        if len(pages) != -(-len(key) // self._page_bytes):
            raise ValueError(f"{len(pages)} pages for {len(key) // TOKEN_BYTES} tokens of page size {self.page_size}")
        num_full = len(key) // self._page_bytes
        key = key[: num_full * self._page_bytes]
        node, num_bytes, partial, partial_bytes = self._walk(namespace, key)
        if partial is not None:
            node = self._split(partial, partial_bytes)
        num_present = (num_bytes + partial_bytes) // self._page_bytes
        if num_present < num_full:
            node = self._append(namespace, node, key[num_present * self._page_bytes :], pages[num_present:num_full])
        held = self._touch(node).pages[:num_present]
        rejected = [page for page, own in zip(pages, held, strict=False) if page != own]
        return Insertion(node, rejected + pages[num_full:])

    def lock(self, node: Node | None) -> None:
        """Keeps `node` and all its ancestors from eviction until as many `unlock`s. None: nothing matched."""
        while node is not None:
            if node.num_locks == 0:
                self._num_locked_pages += len(node.pages)
            node.num_locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Undoes one `lock`.

        Raises:
            ValueError: the node is not locked: the caller unlocks twice.
        """
        while node is not None:
            if node.num_locks == 0:
                raise ValueError("unlock of a node that is not locked")
            node.num_locks -= 1
            if node.num_locks == 0:
                self._num_locked_pages -= len(node.pages)
                self._enqueue(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        """Gives back up to `num_pages` pages: the tails of the least recently used unlocked leaves.

        Returns fewer when everything else is locked, at once. A node with children is never removed.
        """
        freed: list[int] = []
        while len(freed) < num_pages and self._queue:
            leaf = self._pop_oldest_leaf()
            if leaf is None:
                break
            freed += self._shorten(leaf, num_pages - len(freed))
        if freed:
            self.version += 1
        return freed

    def flush(self) -> list[int]:
        """Gives back every page that is not locked."""
        return self.evict(self.num_evictable_pages)

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first, for invariants and tests."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            if node.parent is not None:
                yield node
            pending.extend(node.children.values())

    def _walk(self, namespace: bytes, key: bytes) -> tuple[Node | None, int, Node | None, int]:
        """Follows `key` down.

        Returns:
            The last node reached in full (None above the first), the bytes that it covers, the child that matches only
            in part, if one does, and the bytes of it that match.
        """
        node = self._roots.get(namespace)
        position = 0
        page_bytes = self._page_bytes
        last_start = len(key) - page_bytes
        while node is not None and position <= last_start:
            child = node.children.get(key[position : position + page_bytes])
            if child is None:
                break
            if not key.startswith(child.key, position):
                return _unless_root(node), position, child, self._common_bytes(child.key, key, position)
            position += len(child.key)
            node = child
        return _unless_root(node), position, None, 0

    def _common_bytes(self, edge: bytes, key: bytes, position: int) -> int:
        """Length of the longest common run of pages of `edge` and key[position:]; the first is known to agree."""
        low, high = 1, min(len(edge), len(key) - position) // self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[: middle * self._page_bytes], position):
                low = middle
            else:
                high = middle - 1
        return low * self._page_bytes

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Cuts an edge in two and returns the upper part. Holders of `node` keep the lower part and all above."""
        parent = node.parent
        assert parent is not None
        num_pages = num_bytes // self._page_bytes
        upper = Node(parent, node.key[:num_bytes], node.pages[:num_pages], node.namespace)
        upper.last_used, upper.num_locks = node.last_used, node.num_locks
        parent.children[self._first_page(upper.key)] = upper
        node.parent, node.key, node.pages = upper, node.key[num_bytes:], node.pages[num_pages:]
        upper.children[self._first_page(node.key)] = node
        return upper

    def _append(self, namespace: bytes, parent: Node | None, key: bytes, pages: list[int]) -> Node:
        self._num_pages += len(pages)
        self.version += 1
        if parent is not None and not parent.children and not parent.num_locks:
            parent.key += key  # nobody stands on its end: a growing conversation stays one edge
            parent.pages += pages
            return parent
        if parent is None:
            parent = self._roots.setdefault(namespace, Node(None, b"", [], namespace))
        leaf = Node(parent, key, pages, namespace)
        parent.children[self._first_page(key)] = leaf
        self._enqueue(leaf)
        return leaf

    def _touch(self, node: Node | None) -> Match:
        self._tick += 1
        path: list[Node] = []
        step = node
        while step is not None and step.parent is not None:
            step.last_used = self._tick
            path.append(step)
            step = step.parent
        pages: list[int] = []
        for step in reversed(path):
            pages += step.pages
        return Match(node, pages)

    def _enqueue(self, node: Node) -> None:
        """Puts an unlocked leaf in line for eviction, once: the line is never longer than the tree."""
        if node.children or node.num_locks or node.is_queued or node.parent is None:
            return
        node.is_queued = True
        self._num_queued += 1
        heapq.heappush(self._queue, (node.last_used, self._num_queued, node))

    def _pop_oldest_leaf(self) -> Node | None:
        """The least recently used unlocked leaf. Entries made stale by a lock, a child or a later use are set right."""
        while self._queue:
            queued_tick, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if node.num_locks or node.children:
                continue  # comes back when unlocked or when its last child goes
            if node.last_used == queued_tick:
                return node
            self._enqueue(node)
        return None

    def _shorten(self, leaf: Node, num_pages: int) -> list[int]:
        """Takes up to `num_pages` pages off the end of a leaf; removes it when none is left."""
        kept = max(len(leaf.pages) - num_pages, 0)
        freed = leaf.pages[kept:]
        freed.reverse()
        del leaf.pages[kept:]
        self._num_pages -= len(freed)
        if kept:
            leaf.key = leaf.key[: kept * self._page_bytes]
            self._enqueue(leaf)
        else:
            self._remove(leaf)
        return freed

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first_page(leaf.key)]
        leaf.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        else:
            self._enqueue(parent)

    def _first_page(self, key: bytes) -> bytes:
        return key[: self._page_bytes]


def _unless_root(node: Node | None) -> Node | None:
    return None if node is None or node.parent is None else node
