"""Splitting: the state under tensor-parallel attention becomes a state of each rank under data-parallel
attention.

Every rank gets the pages of its requests and a part of the kept ones. Of each page it has the unit of its own
head group already, and keeps it in place. It reads the units of the other groups, each from one rank that has
it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from engine_adapter.batching.kv_cache import identify
from engine_adapter.kv_switch.assignment import PageDemand, assign
from engine_adapter.kv_switch.capacity import REMEDY, check_length
from engine_adapter.kv_switch.kept_pages import KeptPlacement
from engine_adapter.kv_switch.kv_state import (
    KvPage,
    KvState,
    OpenSequence,
    Switched,
    SwitchRefused,
    UnitRead,
    group_of_rank,
)
from engine_adapter.kv_switch.ledger import PageLedger, filled_pages
from engine_adapter.kv_switch.unit_plan import SourceChoice, UnitCopy, UnitPlan
from fleet.blocks import BLOCK_SIZE
from fleet.layout import held_limit


class RankLayout(NamedTuple):
    """Data-parallel attention. max_pages, max_running: pages of a rank, and requests that may run on it."""

    ranks: int
    groups: int
    max_pages: int
    max_running: int
    block_size: int = BLOCK_SIZE


class _Placed(NamedTuple):
    ledger: PageLedger
    running: list[list[OpenSequence]]
    """Of each rank, as in the next two."""
    waiting: list[list[OpenSequence]]
    pages: list[set[int]]


def split(
    state: KvState,
    *,
    ranks: int,
    groups: int,
    max_pages: int,
    max_running: int,
    block_size: int = BLOCK_SIZE,
    preempt: bool = False,
) -> Switched:
    """Return the state of each rank under data-parallel attention.

    groups: head groups, G. max_pages, max_running: pages of a rank, and requests that may run on it. The
    latest arrivals beyond the sum of `max_running` lose their pages and wait. Kept pages that do not fit are
    dropped. SwitchRefused when the pages of the requests do not fit, or a request is too long for a rank.
    preempt: the latest arrivals lose their pages instead, and wait. No preemption helps a request that is too
    long.
    """
    layout = RankLayout(ranks, groups, max_pages, max_running, block_size)
    return _carry_out(state, _place(state, layout, preempt), layout)


def destinations(state: KvState, layout: RankLayout) -> list[set[int]]:
    """Return the pages that each rank would get in a split now. SwitchRefused as in `split`."""
    return _place(state, layout, preempt=False).pages


def _place(state: KvState, layout: RankLayout, preempt: bool) -> _Placed:
    """Choose the ranks of all requests and pages."""
    ranks, max_running = layout.ranks, layout.max_running
    for one in (*state.running, *state.waiting):
        check_length(len(one.tokens) - one.generated + one.max_new, layout.max_pages * layout.block_size)
    registered = [page.block is not None for page in state.pages]
    ledger = PageLedger(registered, state.kept, state.running, state.waiting)
    while len(ledger.running) > ranks * max_running:
        ledger.preempt()
    copied = _copied(state, ranks)
    owners = _assign(state, ledger, copied, layout, preempt)
    running: list[list[OpenSequence]] = [[] for _ in range(ranks)]
    for one, owner in zip(ledger.running, owners, strict=True):
        running[owner].append(one)
    pages = [{page for one in ours for page in one.pages} for ours in running]
    waiting = _assign_waiting(state, ledger, pages, layout.block_size)
    _place_kept(state, ledger, pages, copied, layout)
    return _Placed(ledger, running, waiting, pages)


def _units_of_rank(state: KvState) -> int:
    """Return the number of units that pages of the next layout can take on each rank."""
    ahead = [len(copies) for copies in state.ahead] or [0] * len(state.free)
    return len(state.pages) + min(map(sum, zip(map(len, state.free), ahead, strict=True)))


def _copied(state: KvState, ranks: int) -> list[set[int]]:
    """Return the pages of which each rank has copies of other groups' units."""
    page_of = {copy: at for at, page in enumerate(state.pages) for copy in enumerate(page.units)}
    valid = set(state.announced)
    copied: list[set[int]] = [set() for _ in range(ranks)]
    for pages, copies in zip(copied, state.ahead, strict=False):
        pages.update(page_of[one.source_rank, one.source] for one in copies if one.key in valid)
    return copied


def _spare(state: KvState, ledger: PageLedger) -> int:
    """Return the number of units of each rank that no held and no kept page has."""
    present = sum(ledger.present(page) for page in range(len(state.pages)))
    return _units_of_rank(state) - present


def _assign(
    state: KvState, ledger: PageLedger, copied: Sequence[set[int]], layout: RankLayout, preempt: bool
) -> list[int]:
    """Return the rank of each running request. Preempt or refuse where no assignment is found."""
    while True:
        room = _spare(state, ledger) + len(ledger.kept)
        limit = layout.max_pages if layout.groups == 1 else min(layout.max_pages, room // (layout.groups - 1))
        owners = assign(
            [PageDemand(frozenset(one.pages), one.rank, _home(one, copied)) for one in ledger.running],
            ranks=layout.ranks,
            max_pages=limit,
            max_running=layout.max_running,
        )
        if owners is not None:
            return owners
        if not preempt:
            raise _refusal(state, ledger, layout, limit)
        ledger.preempt()


def _home(sequence: OpenSequence, copied: Sequence[set[int]]) -> int | None:
    """Return the rank that has copies of most of the request's pages. None if no rank has any."""
    counts = [sum(page in pages for page in sequence.pages) for pages in copied]
    return counts.index(max(counts)) if any(counts) else None


def _refusal(state: KvState, ledger: PageLedger, layout: RankLayout, limit: int) -> SwitchRefused:
    held = sum(holders > 0 for holders in ledger.holders)
    units = _units_of_rank(state)
    return SwitchRefused(
        f"switch to data-parallel attention: found no assignment of {len(ledger.running)} running requests to"
        f" {layout.ranks} ranks, each with at most {layout.max_running} requests and {limit} pages; they hold"
        f" {held} pages, {held / units:.1%} of the KV memory, the largest"
        f" {max(len(one.pages) for one in ledger.running)}; {held_limit(layout.ranks, layout.groups):.1%} is"
        f" the limit where they spread evenly; {REMEDY}"
    )


def _assign_waiting(
    state: KvState, ledger: PageLedger, held: Sequence[set[int]], block_size: int
) -> list[list[OpenSequence]]:
    """Return the waiting requests of each rank, in their order. Each goes to the rank that has the fewest
    pages with it, those that it shares with running requests counted once."""
    by_hash = _by_hash(state)
    loads = [len(pages) for pages in held]
    waiting: list[list[OpenSequence]] = [[] for _ in held]
    for one in ledger.waiting:
        total = -(-len(one.tokens) // block_size)
        blocks = identify(one.tokens, block_size, one.salt)
        options: list[tuple[int, bool, int]] = []
        for rank, pages in enumerate(held):
            shared = 0
            while shared < len(blocks) and by_hash.get(blocks[shared].block_hash) in pages:
                shared += 1
            options.append((loads[rank] + total - shared, rank != one.rank, rank))
        best = min(options)
        loads[best[-1]] = best[0]
        waiting[best[-1]].append(one)
    return waiting


def _place_kept(
    state: KvState,
    ledger: PageLedger,
    placed: list[set[int]],
    copied: Sequence[set[int]],
    layout: RankLayout,
) -> None:
    by_hash = _by_hash(state)
    parents = {
        at: by_hash[page.parent]
        for at, page in enumerate(state.pages)
        if page.block is not None and page.parent is not None
    }
    kept = KeptPlacement(
        placed,
        parents,
        copied,
        spare=_spare(state, ledger),
        groups=layout.groups,
        max_pages=layout.max_pages,
    )
    kept.place(list(ledger.kept))


def _by_hash(state: KvState) -> dict[int, int]:
    return {page.block.block_hash: at for at, page in enumerate(state.pages) if page.block is not None}


def _carry_out(state: KvState, placed: _Placed, layout: RankLayout) -> Switched:
    """Give units to the pages of every rank, and lay out the state of each."""
    ledger, running, waiting, _ = placed
    somewhere = set().union(*placed.pages)
    filled = {page for one in ledger.running for page in filled_pages(one, layout.block_size)}
    sources = SourceChoice(layout.ranks)
    states: list[KvState] = []
    reads: list[list[UnitRead]] = []
    for rank, pages in enumerate(placed.pages):
        mine = [page for page in range(len(state.pages)) if page in pages]
        plan = _unit_plan(rank, state, somewhere)
        laid_out = [
            KvPage(
                _units(rank, state.pages[page], page in filled, plan, sources, layout),
                state.pages[page].block,
                state.pages[page].parent,
            )
            for page in mine
        ]
        place = {page: at for at, page in enumerate(mine)}
        states.append(
            KvState(
                pages=laid_out,
                kept=[place[page] for page in _kept_of(mine, running[rank], ledger)],
                running=[replace(one, pages=[place[page] for page in one.pages]) for one in running[rank]],
                waiting=waiting[rank],
                free=[plan.free],
                quarantined=[state.quarantined[rank]] if state.quarantined else [],
            )
        )
        reads.append(plan.reads)
    evicted = [
        page.block.block_hash
        for at, page in reversed(list(enumerate(state.pages)))
        if page.block is not None and at not in somewhere
    ]
    return Switched(states, reads, evicted)


def _unit_plan(rank: int, state: KvState, somewhere: set[int]) -> UnitPlan:
    ahead: dict[UnitCopy, int] = {}
    free = list(state.free[rank])
    valid = set(state.announced)
    for one in state.ahead[rank] if state.ahead else ():
        if one.key in valid:
            ahead[UnitCopy(one.source_rank, one.source)] = one.unit
        else:
            free.append(one.unit)
    units = [page.units[rank] for page in state.pages]
    gone = [unit for page, unit in enumerate(units) if page not in somewhere]
    return UnitPlan([*free, *ahead.values(), *units], [*free, *gone], ahead)


def _units(
    rank: int, page: KvPage, filled: bool, plan: UnitPlan, sources: SourceChoice, layout: RankLayout
) -> tuple[int, ...]:
    """Return the unit of each head group of a page on its new rank, [G]."""
    own = group_of_rank(rank, layout.ranks, layout.groups)
    replicas = layout.ranks // layout.groups
    units: list[int] = []
    for group in range(layout.groups):
        if group == own:
            units.append(plan.keep(page.units[rank]))
        elif filled or page.block is not None:
            holders = range(group * replicas, (group + 1) * replicas)
            units.append(plan.fill([UnitCopy(one, page.units[one]) for one in holders], sources))
        else:
            units.append(plan.take())
    return tuple(units)


def _kept_of(mine: Sequence[int], running: Sequence[OpenSequence], ledger: PageLedger) -> list[int]:
    """Return the rank's pages that none of its requests holds, in order of eviction. Those that requests of
    other ranks hold come last, children before parents: their blocks come before kept ones in a chain."""
    held = {page for one in running for page in one.pages}
    loose = [page for page in reversed(mine) if page not in held]
    ours = set(loose)
    first = [page for page in ledger.kept if page in ours]
    return [*first, *(page for page in loose if page not in ledger.kept)]
