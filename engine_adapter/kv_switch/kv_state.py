"""All that a switch of attention knows of KV pages and requests, as plain data that travels as MessagePack.

A *unit* is the KV of one page of one head group. Under data-parallel attention (dp) a page is one unit for
each of the G head groups, all on one rank. Under tensor-parallel attention (tp) it is one unit on each of the
P ranks, and rank r has the unit of head group `group_of_rank(r, P, G)`.
"""

from typing import NamedTuple

import msgspec

from engine_adapter.batching.kv_cache import Block


class SwitchRefused(ValueError):
    """The requests that are open cannot be served in the next layout. The message has the numbers and the
    remedy."""


class KvPage(msgspec.Struct, frozen=True):
    """One page that a request holds, or that is kept for reuse."""

    units: tuple[int, ...]
    """dp: unit of each head group on the page's rank, [G]. tp: unit on each rank, [P]."""
    block: Block | None
    """The registered block. None: the page is private, because it is not full or its hash collided."""
    parent: int | None
    """u64 sequence hash of the block before it. None: the page is private, or the block is the first."""


class OpenSequence(msgspec.Struct):
    """All of a request that travels. Fields without a docstring are those of `SequenceState` and its
    table."""

    rank: int
    """The rank that accepted it."""
    number: int
    """Its number on that rank."""
    arrived: int
    """Wall-clock time at which that rank accepted it, in nanoseconds."""
    request: bytes
    """The request itself and the state of its answer, encoded by the engine. Not read here."""
    tokens: list[int]
    max_new: int
    computed: int
    generated: int
    cached_tokens: int
    admissions: int
    salt: str
    registered: int
    collided: bool
    pages: list[int]
    """Indexes into `KvState.pages`, in the order of its tokens. Empty while it waits."""


class AheadRead(msgspec.Struct, frozen=True):
    """A copy of a unit that was made before the switch, in a reserved unit of the reader."""

    key: int
    """Of the announcement (`announcing`)."""
    source_rank: int
    source: int
    unit: int


class KvState(msgspec.Struct):
    """Pages and requests of one scheduler: of each rank under dp, of the engine under tp."""

    pages: list[KvPage]
    """Registered pages, parents before children, then private ones."""
    kept: list[int]
    """Indexes of the pages that no request holds, in order of eviction."""
    running: list[OpenSequence]
    """In order of arrival."""
    waiting: list[OpenSequence]
    """In order of admission."""
    free: list[list[int]]
    """Units that no page has. dp: one list, of the rank. tp: one list for each rank."""
    announced: list[int] = []
    """Keys of announced pages that still have the content that was announced."""
    ahead: list[list[AheadRead]] = []
    """Copies of other ranks' pages, in units that are neither free nor of a page. Lists as in `free`, or
    none."""
    quarantined: list[list[int]] = []
    """Units that a late read may still write. Lists as in `free`, or none."""


class UnitRead(NamedTuple):
    """Copy of unit `source` of rank `source_rank` into the reader's own unit `unit`."""

    source_rank: int
    source: int
    unit: int


class Switched(NamedTuple):
    """Books of the next layout, and the copies that fill its pages."""

    states: list[KvState]
    """To tp: one. To dp: one for each rank."""
    reads: list[list[UnitRead]]
    """Copies that each rank makes, in any order: none overwrites the source of another."""
    evicted: list[int]
    """u64 sequence hashes of blocks that are registered no longer, children before parents."""


def group_of_rank(rank: int, ranks: int, groups: int) -> int:
    """Return the head group that a rank computes under tp."""
    return rank * groups // ranks
