"""Prompts whose computation shows in KV events: it is over when the rank holds the last full block. Pure."""

from typing import Generic, TypeVar

from router.fleet_state.target_table import RankKey
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.prompt import Prompt

_Request = TypeVar("_Request")


class AwaitedPrompts(Generic[_Request]):
    """State: by rank and request, the sequence hash of the last full block of the prompt."""

    def __init__(self, block_index: BlockIndex) -> None:
        self._block_index = block_index
        self._awaited: dict[RankKey, dict[_Request, int]] = {}

    def begin(self, rank: RankKey, request: _Request, prompt: Prompt, block_size: int) -> bool:
        """Await the computation of a prompt, until `end`. False if no event will tell of it: the prompt is
        known only as text, has no full block, or the rank already holds all of them.
        """
        blocks = prompt.chained(block_size)
        if not prompt.ids or not blocks:
            return False
        last = blocks[len(blocks) - 1]
        if self._block_index.holds(rank, last):
            return False
        self._awaited.setdefault(rank, {})[request] = last
        return True

    def end(self, rank: RankKey, request: _Request) -> None:
        """Await a prompt no longer. One that is not awaited is ignored."""
        awaited = self._awaited.get(rank)
        if awaited is not None:
            awaited.pop(request, None)
            if not awaited:
                del self._awaited[rank]

    def computed(self, rank: RankKey) -> list[_Request]:
        """Return the requests whose prompts the rank has computed by now. They are awaited no longer."""
        awaited = self._awaited.get(rank)
        if awaited is None:
            return []
        done = [request for request, block in awaited.items() if self._block_index.holds(rank, block)]
        for request in done:
            self.end(rank, request)
        return done
