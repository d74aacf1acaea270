"""Merging: the states of all ranks under data-parallel attention become one state under tensor-parallel
attention.

Every rank needs one unit of every page. A rank with a copy of the page keeps the unit of its head group in
place. The others read it into a unit that is free, or that belonged to an evicted page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from engine_adapter.batching.kv_cache import Block
from engine_adapter.kv_switch.capacity import REMEDY
from engine_adapter.kv_switch.kv_state import (
    AheadRead,
    KvPage,
    KvState,
    OpenSequence,
    Switched,
    SwitchRefused,
    group_of_rank,
)
from engine_adapter.kv_switch.ledger import PageLedger, filled_pages
from engine_adapter.kv_switch.unit_plan import SourceChoice, UnitCopy, UnitPlan
from fleet.blocks import BLOCK_SIZE
from fleet.layout import held_limit


def merge(
    states: Sequence[KvState],
    *,
    groups: int,
    max_running: int,
    block_size: int = BLOCK_SIZE,
    preempt: bool = False,
) -> Switched:
    """Return the state of the engine under tensor-parallel attention.

    states: of each rank. groups: head groups, G. max_running: requests that may run in the engine; later
    arrivals beyond it lose their pages and wait. Kept pages are evicted where units are missing.
    SwitchRefused when that does not suffice. preempt: the latest arrivals lose their pages instead, and wait.
    """
    pages, index = _gather(states)
    ledger = _ledger(states, pages, index)
    gone = [page for page in range(len(pages)) if not ledger.present(page)]
    while len(ledger.running) > max_running:
        gone += ledger.preempt()
    gone += _make_room(states, pages, ledger, gone, groups, preempt)
    return _carry_out(states, pages, ledger, set(gone), groups, block_size)


@dataclass(slots=True)
class _Copies:
    """A page of the merged state, and the ranks that have it now."""

    block: Block | None
    parent: int | None
    units: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: unit of each head group, [G]."""

    def same_as(self, page: KvPage) -> bool:
        return self.block == page.block and self.parent == page.parent


class _Gathered(NamedTuple):
    pages: list[_Copies]
    merged: list[list[int]]
    """By rank and page of its state: index into `pages`."""


def _gather(states: Sequence[KvState]) -> _Gathered:
    """Give one page to each hash. A block whose hash names another block on an earlier rank becomes private,
    and so do all blocks after it: their content differs, even if their hashes and parents' hashes are
    equal."""
    pages: list[_Copies] = []
    index: list[list[int]] = []
    by_hash: dict[int, int] = {}
    for rank, state in enumerate(states):
        collided: set[int] = set()
        index.append([])
        for page in state.pages:
            at = len(pages)
            if page.block is None:
                pages.append(_Copies(None, None))
            else:
                name = page.block.block_hash
                known = by_hash.get(name)
                if page.parent in collided or (known is not None and not pages[known].same_as(page)):
                    collided.add(name)
                    pages.append(_Copies(None, None))
                elif known is not None:
                    at = known
                else:
                    by_hash[name] = at
                    pages.append(_Copies(page.block, page.parent))
            pages[at].units[rank] = page.units
            index[rank].append(at)
    return _Gathered(pages, index)


def _ledger(states: Sequence[KvState], pages: list[_Copies], index: list[list[int]]) -> PageLedger:
    running = [
        _carried(one, index[rank], pages) for rank, state in enumerate(states) for one in state.running
    ]
    waiting = [one for state in states for one in state.waiting]
    running.sort(key=_arrival)
    waiting.sort(key=_arrival)
    held = {page for one in running for page in one.pages}
    last: dict[int, tuple[int, int]] = {}  # page -> its latest place in the ranks' orders of eviction
    for rank, state in enumerate(states):
        for back, old in enumerate(state.kept, start=-len(state.kept)):
            page = index[rank][old]
            if page not in held and pages[page].block is not None:
                last[page] = max(last.get(page, (back, rank)), (back, rank))
    return PageLedger(
        [one.block is not None for one in pages], sorted(last, key=last.__getitem__), running, waiting
    )


def _arrival(sequence: OpenSequence) -> tuple[int, int, int]:
    return sequence.arrived, sequence.rank, sequence.number


def _carried(sequence: OpenSequence, index: list[int], pages: list[_Copies]) -> OpenSequence:
    """Return the sequence with pages of the merged state."""
    moved = [index[page] for page in sequence.pages]
    registered = 0
    while registered < sequence.registered and pages[moved[registered]].block is not None:
        registered += 1
    collided = sequence.collided or registered < sequence.registered
    return replace(sequence, pages=moved, registered=registered, collided=collided)


def _make_room(
    states: Sequence[KvState],
    pages: list[_Copies],
    ledger: PageLedger,
    gone: list[int],
    groups: int,
    preempt: bool,
) -> list[int]:
    """Evict and preempt until every rank has a unit for each page that it has not. Return the pages that are
    gone besides `gone`."""
    spare = [
        len(state.free[0]) + len(_ahead(state)) - sum(rank not in one.units for one in pages)
        for rank, state in enumerate(states)
    ]
    more: list[int] = []

    def release(page: int) -> None:
        for rank in range(len(states)):
            spare[rank] += groups if rank in pages[page].units else 1

    for page in gone:
        release(page)
    while min(spare) < 0:
        if ledger.kept:
            dropped = [ledger.evict()]
        elif preempt and ledger.running:
            dropped = ledger.preempt()
        else:
            raise _refusal(states, pages, ledger, spare, groups)
        for page in dropped:
            release(page)
        more += dropped
    return more


def _refusal(
    states: Sequence[KvState], pages: list[_Copies], ledger: PageLedger, spare: list[int], groups: int
) -> SwitchRefused:
    rank = spare.index(min(spare))
    held = [one for page, one in enumerate(pages) if ledger.holders[page]]
    own = sum(rank in one.units for one in held)
    units = len(states[rank].free[0]) + len(_ahead(states[rank])) + groups * len(states[rank].pages)
    return SwitchRefused(
        f"switch to tensor-parallel attention: rank {rank} misses {-spare[rank]} of {len(held) - own} units"
        f" for the pages of other ranks; requests hold {groups * own / units:.1%} of its KV memory, and"
        f" {held_limit(len(states), groups):.1%} on every rank is the limit; {REMEDY}"
    )


def _carry_out(
    states: Sequence[KvState],
    pages: list[_Copies],
    ledger: PageLedger,
    gone: set[int],
    groups: int,
    block_size: int,
) -> Switched:
    """Give units to all pages that stay, and lay out the merged state."""
    ranks = len(states)
    plans = [_unit_plan(rank, states, pages, gone) for rank in range(ranks)]
    filled = {page for one in ledger.running for page in filled_pages(one, block_size)}
    sources = SourceChoice(ranks)
    merged: list[KvPage] = []
    place: dict[int, int] = {}
    stay = [page for page in range(len(pages)) if page not in gone]
    for page in sorted(stay, key=lambda page: pages[page].block is None):  # stable: parents before children
        one = pages[page]
        units: list[int] = []
        for rank, plan in enumerate(plans):
            group = group_of_rank(rank, ranks, groups)
            if rank in one.units:
                units.append(plan.keep(one.units[rank][group]))
            elif one.block is not None or page in filled:
                copies = [UnitCopy(holder, copy[group]) for holder, copy in one.units.items()]
                units.append(plan.fill(copies, sources))
            else:
                units.append(plan.take())
        place[page] = len(merged)
        merged.append(KvPage(tuple(units), one.block, one.parent))
    state = KvState(
        pages=merged,
        kept=[place[page] for page in ledger.kept],
        running=[replace(one, pages=[place[page] for page in one.pages]) for one in ledger.running],
        waiting=list(ledger.waiting),
        free=[plan.free for plan in plans],
        quarantined=[unit for one in states for unit in one.quarantined or [[]]],
    )
    return Switched([state], [plan.reads for plan in plans], _evicted(states, state))


def _unit_plan(rank: int, states: Sequence[KvState], pages: list[_Copies], gone: set[int]) -> UnitPlan:
    """Return the rank's units before the switch. A copy that was made ahead counts if its page still has the
    content that was announced; else its unit is free."""
    ahead: dict[UnitCopy, int] = {}
    free = list(states[rank].free[0])
    valid = [set(state.announced) for state in states]
    for one in _ahead(states[rank]):
        if one.key in valid[one.source_rank]:
            ahead[UnitCopy(one.source_rank, one.source)] = one.unit
        else:
            free.append(one.unit)
    dropped = [unit for page in gone for unit in pages[page].units.get(rank, ())]
    used = [unit for page in states[rank].pages for unit in page.units]
    return UnitPlan([*free, *ahead.values(), *used], [*free, *dropped], ahead)


def _ahead(state: KvState) -> list[AheadRead]:
    return state.ahead[0] if state.ahead else []


def _evicted(states: Sequence[KvState], merged: KvState) -> list[int]:
    """Return the hashes that no page of the merged state has, children before parents."""
    registered = {page.block.block_hash for page in merged.pages if page.block is not None}
    before = [page.block.block_hash for state in states for page in state.pages if page.block is not None]
    return list(dict.fromkeys(name for name in reversed(before) if name not in registered))
