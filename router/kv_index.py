"""Which rank has which prompt prefix in its KV cache: the door to Dynamo's radix tree, and the only file that knows it."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import msgspec
from dynamo._core import RadixTree

from fleet.events import KvChange, KvEvent, RoutedKvEvent
from router.roster import RankKey

_ENCODER = msgspec.json.Encoder()


class OrphanBlock(Exception):
    """A block was stored behind a parent that the index does not know: something was missed, and a snapshot is needed."""


class BadKvEvent(Exception):
    """An event that the index cannot take at all: a number outside u64, or a form it does not know."""


class _Overlap(Protocol):
    @property
    def scores(self) -> dict[RankKey, int]: ...


class _Tree(Protocol):
    """What we use of `RadixTree` (its own stubs cannot be read by a type checker)."""

    def find_matches(self, sequence: Sequence[int], early_exit: bool = ...) -> _Overlap: ...
    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None: ...
    def remove_worker(self, worker_id: int) -> None: ...


class KvIndex:
    """All hashes and worker_ids are unsigned 64-bit. Calls block for some ten microseconds at most, per event or look-up."""

    def __init__(self) -> None:
        self.missing_removals = 0
        """removals that named a block the index did not have"""
        self._tree = cast(_Tree, RadixTree())

    def overlap(self, local: Sequence[int]) -> dict[RankKey, int]:
        """Leading blocks of a prompt (by local hash) that each rank holds; ranks without any are left out."""
        return self._tree.find_matches(local).scores if local else {}

    def apply(self, routed: Iterable[RoutedKvEvent]) -> None:
        """Apply a batch in order. OrphanBlock when a stored block's parent is unknown, BadKvEvent for nonsense; what came before is applied."""
        for one in routed:
            self._apply(one.worker_id, one.event)

    def replace(self, rank: RankKey, events: Iterable[KvEvent]) -> None:
        """Forget what is known of one rank and apply a snapshot instead."""
        worker_id, dp_rank = rank
        self._apply(worker_id, KvEvent(event_id=0, data="cleared", dp_rank=dp_rank))
        for event in events:
            self._apply(worker_id, event)

    def remove_worker(self, worker_id: int) -> None:
        self._tree.remove_worker(worker_id)

    def _apply(self, worker_id: int, event: KvEvent) -> None:
        try:
            self._tree.apply_event(worker_id, _ENCODER.encode(event))
        except RuntimeError as error:
            if isinstance(event.data, KvChange) and event.data.stored is not None:
                raise OrphanBlock(f"worker {worker_id} rank {event.dp_rank}: block stored behind unknown parent {event.data.stored.parent_hash}") from error
            self.missing_removals += 1
            # a removal of blocks that are gone already removes the others named with it, and nothing is amiss
        except (ValueError, OverflowError) as error:
            raise BadKvEvent(f"worker {worker_id} rank {event.dp_rank}: {error}") from error
