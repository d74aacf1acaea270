"""Holders of pages while the next layout is decided: eviction of kept pages, and preemption of requests."""

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from engine_adapter.kv_switch.kv_state import OpenSequence


class PageLedger:
    """Requests, and the pages that they hold. It changes as a rank's scheduler and cache would change: a
    registered page without a holder is kept and evicted last, a private one is dropped."""

    def __init__(
        self,
        registered: Sequence[bool],
        kept: Iterable[int],
        running: Iterable[OpenSequence],
        waiting: Iterable[OpenSequence],
    ) -> None:
        self._registered = registered
        self.kept: dict[int, None] = dict.fromkeys(kept)
        """Pages that no request holds, in order of eviction."""
        self.running = list(running)
        self.waiting = deque(waiting)
        self.holders = [0] * len(registered)
        """Number of requests that hold each page."""
        for sequence in self.running:
            for page in sequence.pages:
                self.holders[page] += 1

    def present(self, page: int) -> bool:
        """True if the page is held or kept."""
        return self.holders[page] > 0 or page in self.kept

    def evict(self) -> int:
        """Evict the first kept page and return it."""
        page = next(iter(self.kept))
        del self.kept[page]
        return page

    def preempt(self) -> list[int]:
        """Take all pages from the latest running request, which then waits before all others. Return the
        pages that are gone."""
        latest = self.running.pop()
        gone: list[int] = []
        for page in reversed(latest.pages):
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            if self._registered[page]:
                self.kept[page] = None
            else:
                gone.append(page)
        self.waiting.appendleft(replace(latest, pages=[], computed=0, registered=0, collided=False))
        return gone


def filled_pages(sequence: OpenSequence, block_size: int) -> list[int]:
    """Return the pages that hold KV of computed tokens. The rest was only allocated."""
    return sequence.pages[: -(-sequence.computed // block_size)]
