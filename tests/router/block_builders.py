"""What tests say to the index of KV blocks, and how they ask it."""

from collections.abc import Sequence

from fleet.blocks import sequence_hashes
from fleet.facts.dynamo_kv import KvChange, KvEvent, KvRemoved, RoutedKvEvent
from router.fleet_state.target_table import RankKey
from router.prefix_index.block_index import BlockIndex
from tests.router.router_fixture import WORKER


class Made(list[int]):
    """Sequence hashes that are there already."""

    def reach(self, depth: int) -> list[int]:
        return self


def overlap(block_index: BlockIndex, chained: Sequence[int]) -> dict[RankKey, int]:
    """Leading blocks of a prompt, given by its sequence hashes, that each rank holds."""
    return block_index.overlaps(Made(chained))


def removed(local: Sequence[int], which: Sequence[int], worker: int = WORKER, rank: int = 0) -> RoutedKvEvent:
    """Of the prompt with these local hashes, some blocks are gone."""
    chained = sequence_hashes(local)
    hashes = tuple(chained[at] for at in which)
    return RoutedKvEvent(
        worker_id=worker,
        event=KvEvent(event_id=1, dp_rank=rank, data=KvChange(removed=KvRemoved(block_hashes=hashes))),
    )


def cleared(worker: int = WORKER, rank: int = 0) -> RoutedKvEvent:
    return RoutedKvEvent(worker_id=worker, event=KvEvent(event_id=1, dp_rank=rank, data="cleared"))
