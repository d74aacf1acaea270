"""KV state of a scheduler, and a scheduler of a KV state. Page `p` of the new scheduler's cache is
`pages[p]`."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import BlockTable, KvCache, RegisteredBlock
from engine_adapter.batching.scheduler import BatchScheduler, SequenceState
from engine_adapter.kv_switch.kv_state import AheadRead, KvPage, KvState, OpenSequence
from fleet.blocks import BLOCK_SIZE


class RequestOrigin(NamedTuple):
    """All that `OpenSequence` has of a request besides its tokens and pages. Its docstring explains the
    fields."""

    rank: int
    number: int
    arrived: int
    request: bytes


class AheadCopies(NamedTuple):
    """Result of a pre-copy so far. Lists as the fields of `KvState` with these names."""

    announced: list[int]
    ahead: list[list[AheadRead]]
    quarantined: list[list[int]]


class RestoredScheduler(NamedTuple):
    """A scheduler of a KV state."""

    scheduler: BatchScheduler
    sequences: list[tuple[OpenSequence, SequenceState]]
    """Running ones, then waiting ones, in order."""
    units: NDArray[np.int32]
    """Unit of each page of the cache, free ones included, [pages, units of a page]."""


def state_of(
    scheduler: BatchScheduler,
    units: NDArray[np.int32],
    origins: Mapping[SequenceState, RequestOrigin],
    *,
    tensor_parallel: bool,
    copies: AheadCopies | None = None,
) -> KvState:
    """Return the state of a scheduler between two steps.

    units: of each page of its cache, [pages, G] or, if tensor_parallel, [pages, P]. origins: of every open
    request. copies: in reserved pages of the cache. None: reserved pages are free.
    """
    cache, rows = scheduler.cache, units.tolist()
    place: dict[int, int] = {}
    pages: list[KvPage] = []
    for entry in cache.registered:
        place[entry.page] = len(pages)
        pages.append(KvPage(tuple(rows[entry.page]), entry.block, entry.parent))
    for one in scheduler.running_sequences:
        for page in one.table.pages:
            if page not in place:
                place[page] = len(pages)
                pages.append(KvPage(tuple(rows[page]), None, None))
    unused = units[sorted([*cache.free, *cache.reserved, *cache.withheld])]
    free: list[list[int]] = unused.T.tolist() if tensor_parallel else [unused.ravel().tolist()]
    if copies is not None:
        taken = [
            {one.unit for one in ours} | set(bad)
            for ours, bad in zip(copies.ahead, copies.quarantined, strict=True)
        ]
        free = [[unit for unit in left if unit not in ours] for left, ours in zip(free, taken, strict=True)]
    return KvState(
        pages=pages,
        kept=[place[page] for page in cache.kept],
        running=[_open(one, origins[one], place) for one in scheduler.running_sequences],
        waiting=[_open(one, origins[one], place) for one in scheduler.waiting_sequences],
        free=free,
        announced=copies.announced if copies else [],
        ahead=copies.ahead if copies else [],
        quarantined=copies.quarantined if copies else [],
    )


def restore(
    state: KvState,
    *,
    pages: int,
    page_units: int,
    max_batch_tokens: int,
    max_running: int,
    max_waiting: int,
    block_size: int = BLOCK_SIZE,
) -> RestoredScheduler:
    """Return a scheduler with the pages and requests of a state. Its cache states itself anew in its first
    changes. Pages with quarantined units are reserved in it. pages: of its cache. page_units: units of a
    page, G or P. ValueError if the units are not those of that many pages."""
    tables = [BlockTable(list(one.pages), one.registered, one.collided) for one in state.running]
    registered = [
        RegisteredBlock(at, page.block, page.parent)
        for at, page in enumerate(state.pages)
        if page.block is not None
    ]
    units, lost = _unit_table(state, pages, page_units)
    cache = KvCache.of(pages, registered, state.kept, tables, block_size, reserved=range(pages - lost, pages))
    running = [_sequence(one, table, state) for one, table in zip(state.running, tables, strict=True)]
    waiting = [_sequence(one, BlockTable(), state) for one in state.waiting]
    scheduler = BatchScheduler(
        cache, max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=max_waiting
    )
    scheduler.restore(running, waiting)
    sequences = list(zip([*state.running, *state.waiting], [*running, *waiting], strict=True))
    return RestoredScheduler(scheduler, sequences, units)


def _open(one: SequenceState, origin: RequestOrigin, place: Mapping[int, int]) -> OpenSequence:
    return OpenSequence(
        rank=origin.rank,
        number=origin.number,
        arrived=origin.arrived,
        request=origin.request,
        tokens=list(one.tokens),
        max_new=one.max_new,
        computed=one.computed,
        generated=one.generated,
        cached_tokens=one.cached_tokens,
        admissions=one.admissions,
        salt=one.salt,
        registered=one.table.registered,
        collided=one.table.collided,
        pages=[place[page] for page in one.table.pages],
    )


def _sequence(one: OpenSequence, table: BlockTable, state: KvState) -> SequenceState:
    known = (state.pages[page].block for page in one.pages[: one.registered])
    return SequenceState(
        tokens=list(one.tokens),
        max_new=one.max_new,
        computed=one.computed,
        generated=one.generated,
        cached_tokens=one.cached_tokens,
        admissions=one.admissions,
        table=table,
        blocks=[block for block in known if block is not None],
        salt=one.salt,
    )


def _unit_table(state: KvState, pages: int, page_units: int) -> tuple[NDArray[np.int32], int]:
    """Return the units of each page, [pages, page_units]: those of `state.pages`, then free ones. And how
    many of the last pages have quarantined units."""
    held = np.array([page.units for page in state.pages], np.int32).reshape(-1, page_units)
    quarantined = state.quarantined or [[]] * len(state.free)
    left = np.array([[*free, *bad] for free, bad in zip(state.free, quarantined, strict=True)], np.int32)
    in_one_list = len(state.free) == 1
    rows = left.reshape(-1, page_units) if in_one_list else left.T
    if len(held) + len(rows) != pages:
        raise ValueError(
            f"KV state: units of {len(held)} pages in use and of {len(rows)} others, for a cache of {pages}"
            " pages; restore it with the number of pages of its own layout"
        )
    lost = max(map(len, quarantined))
    return np.concatenate([held, rows]), -(-lost // page_units) if in_one_list else lost
