"""scheduler: whose page is which. Joins the page pool and the radix cache for the requests of one core.

Every page is in exactly one of three places: free in the pool, in the tree, or held by one running request (its page
table beyond the part that the tree lent it). `check` holds the sum. It must never decide who gets pages: that is the
core's.

    request.pages  [ lent by the tree, locked | held: full or being written ]
                     num_tree_pages
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.page_pool import PagePool
from services.scheduler.radix_cache import Node, RadixCache
from services.scheduler.request import Request


class LedgerError(Exception):
    """Pages do not add up: a fault of the scheduler, after which no page can be trusted."""


class KvLedger:
    """The pages of one worker's KV pool.

    Args:
        num_pages: pages of the pool, >= 1.
        page_size: tokens of a page, >= 1.
        caches_prefixes: whether computed pages go to the tree; if not, it stays empty.
    """

    def __init__(self, num_pages: int, page_size: int, caches_prefixes: bool = True) -> None:
        self.page_size = page_size
        self.caches_prefixes = caches_prefixes
        self.pool = PagePool(num_pages)
        self.cache = RadixCache(page_size)
        self.num_evicted_pages = 0

    @property
    def num_available(self) -> int:
        """Pages that `take` and `extend` can have now, by eviction too."""
        return self.pool.num_free + self.cache.num_evictable_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that the KV of so many tokens fills."""
        return -(-num_tokens // self.page_size)

    def peek(self, request: Request) -> int:
        """Tokens of the request that the tree could lend now. Remembered until the tree or the request changes."""
        version, num_tokens, cached_tokens = request.peeked
        if version != self.cache.version or num_tokens != request.num_tokens:
            cached_tokens = self.cache.peek(request.submit.cache_root, self._usable_key(request))
            request.peeked = (self.cache.version, request.num_tokens, cached_tokens)
        return cached_tokens

    def take(self, request: Request, num_reserved: int) -> bool:
        """Gives a request its page table: the longest cached prefix, locked, and pages for its other known tokens.

        Args:
            request: one without pages.
            num_reserved: pages that must still be available afterwards.

        Returns:
            False, with nothing changed, when there are too few.
        """
        num_needed = self.pages_for(request.num_tokens) - self.peek(request) // self.page_size
        if num_needed + num_reserved > self.num_available:
            return False  # locking the prefix could only leave fewer
        match = self.cache.match(request.submit.cache_root, self._usable_key(request))
        self.cache.lock(match.node)
        own = self._allocate(num_needed) if num_needed + num_reserved <= self.num_available else None
        if own is None:
            self.cache.unlock(match.node)
            return False
        request.lock, request.num_tree_pages = match.node, len(match.pages)
        request.pages = match.pages + own
        request.num_computed = request.num_planned = len(match.pages) * self.page_size
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.num_computed, request.num_prompt - 1)
        return True

    def extend(self, request: Request, num_pages: int) -> list[int] | None:
        """Appends pages to a running request's table and returns them; None, with nothing changed, when too few."""
        own = self._allocate(num_pages)
        if own is not None:
            request.pages += own
        return own

    def extend_each(self, requests: Sequence[Request]) -> list[int]:
        """Gives each of these running requests one page more; returns the pages, none when there are too few."""
        own = self._allocate(len(requests)) or []
        for request, page in zip(requests, own, strict=False):
            request.pages.append(page)
        return own

    def publish(self, request: Request) -> None:
        """Lends the computed full pages of a running request to the tree, so that others can match them at once.

        When another request published the same tokens meanwhile, each keeps its own pages until it ends.
        """
        num_full = request.num_computed // self.page_size
        key = request.key(num_full * self.page_size)
        root = request.submit.cache_root
        is_duplicate = self.cache.peek(root, key) > request.num_tree_pages * self.page_size
        if num_full == request.num_tree_pages or is_duplicate or not self.caches_prefixes:
            return
        node = self.cache.insert(root, key, request.pages[:num_full]).node
        self.cache.lock(node)
        self.cache.unlock(request.lock)
        request.lock, request.num_tree_pages = node, num_full

    def release(self, request: Request, is_sound: bool) -> None:
        """Takes all pages of a request away: computed full pages go to the tree, the rest to the pool.

        Args:
            request: a running one.
            is_sound: whether what it computed may be used again; after a numerical error it may not.
        """
        self.cache.unlock(request.lock)
        num_full = request.num_computed // self.page_size if is_sound and self.caches_prefixes else 0
        if num_full > request.num_tree_pages:
            key = request.key(num_full * self.page_size)
            insertion = self.cache.insert(request.submit.cache_root, key, request.pages[:num_full])
            self.pool.free(insertion.rejected)
            self.pool.free(request.pages[num_full:])
        else:
            self.pool.free(request.pages[request.num_tree_pages :])
        request.lock, request.num_tree_pages, request.pages = None, 0, []
        request.num_computed = request.num_planned = 0

    def num_exclusive_pages(self, request: Request) -> int:
        """Pages that a running request alone keeps from others: what retracting it would make available."""
        node: Node | None = request.lock
        num_pages = len(request.pages) - request.num_tree_pages
        while node is not None and node.num_locks == 1:
            num_pages += len(node.pages)
            node = node.parent
        return num_pages

    def could_share(self, request: Request) -> bool:
        """Whether a sibling with the same prompt would find any of it in the tree."""
        return self.caches_prefixes and self.cache.usable_tokens(request.num_prompt) > 0

    def flush(self) -> int:
        """Empties the tree of all that no running request needs; returns the number of pages that became free."""
        freed = self.cache.flush()
        self.pool.free(freed)
        return len(freed)

    def check(self, running: Iterable[Request]) -> None:
        """Recounts every page.

        Raises:
            LedgerError: a page in two places or in none, a lock without a holder, or a holder without a lock.
        """
        places: list[int] = list(self.pool.free_pages())
        locks: dict[int, int] = {}
        for request in running:
            places += request.pages[request.num_tree_pages :]
            node, lent = request.lock, 0
            while node is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                lent += len(node.pages)
                node = node.parent
            if lent != request.num_tree_pages:
                raise LedgerError(f"the tree lends {lent} pages to a request that counts {request.num_tree_pages}")
        num_tree, num_locked = 0, 0
        for node in self.cache.nodes():
            places += node.pages
            num_tree += len(node.pages)
            num_locked += len(node.pages) if node.num_locks else 0
            if node.num_locks != locks.get(id(node), 0):
                raise LedgerError(f"{node.num_locks} locks on a node with {locks.get(id(node), 0)} holders")
        if sorted(places) != list(range(self.pool.num_pages)):
            raise LedgerError(f"{len(places)} pages, {len(set(places))} different, of {self.pool.num_pages}")
        if (num_tree, num_locked) != (self.cache.num_pages, self.cache.num_locked_pages):
            raise LedgerError("the tree miscounts its pages")

    def _allocate(self, num_pages: int) -> list[int] | None:
        num_missing = num_pages - self.pool.num_free
        if num_missing > self.cache.num_evictable_pages:
            return None
        if num_missing > 0:
            evicted = self.cache.evict(num_missing)
            self.num_evicted_pages += len(evicted)
            self.pool.free(evicted)
        return self.pool.allocate(num_pages)

    def _usable_key(self, request: Request) -> bytes:
        """What of it the tree may be asked for: whole pages, never the last token, nothing of which more is wanted."""
        num_tokens = min(self.cache.usable_tokens(request.num_tokens), request.most_cached)
        return request.key(num_tokens // self.page_size * self.page_size)
