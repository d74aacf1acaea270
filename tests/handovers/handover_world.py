"""World of the handover model: its state in compact values, and the rules that its parties follow. See
`handover_model`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fleet.handover import (
    CELL,
    Cell,
    CellEvent,
    CommandVerdict,
    CoordinatorState,
    Filling,
    ProtocolState,
    RankState,
    after_part,
    disagreement,
    flips,
    given_up,
    handle_abort,
    handle_commit,
    handle_propose,
    next_state,
)
from tests.handovers.exploration import Kind

PROPOSE, COMMIT, ABORT = range(3)
NAMES = ("the proposal", "the commit", "the abort")
STAGED, FLIPPED, GIVEN_UP = range(3)
"""facts that ranks report"""
COMMITTED_BIT, ABORTED_BIT = 1, 2
WHOLE, SHARDED = range(2)
"""forms of a layer"""
State = tuple[int, ...]
"""number of the world, then of each rank"""


class Faults(NamedTuple):
    """Limits of faults."""

    leaders: int = 0
    """coordinators after the first"""
    deaths: int = 0
    overdue: int = 0
    corrupted: int = 0
    agents: int = 0
    """deaths of the agent of an engine that rearranges"""
    drops: int = 0
    """maps that a worker drops on its own"""
    votes: int = 0
    """votes in which ballots and results come one by one"""


class Size(NamedTuple):
    ranks: int
    handovers: int
    cells: int
    """of a rank, including the slot's"""
    faults: Faults
    verified_at_once: bool = False
    """arrival and verification of bytes are one step: fewer states"""
    turns: bool = False
    """every handover turns the layer over, to sharded and back to whole: a cell is filled from all ranks"""
    one_by_one: bool = False
    """reads of a cell begin one by one, as their leases are granted; False: all at once, fewer states"""

    @property
    def sources(self) -> tuple[int, ...]:
        """Distance from a rank back to the source of each part that it reads; 0: the rank itself."""
        return tuple(range(self.ranks)) if self.turns else (1,)


class World(NamedTuple):
    """Everything except the ranks."""

    key: tuple[CoordinatorState, int]
    """durable: the state, and the present or last handover"""
    handovers: tuple[tuple[int, int], ...]
    """of each started handover: its incarnation, and the epoch that it creates"""
    coordinators: int
    """number so far, and so the highest token"""
    sent: int
    """bits: which command, token and handover"""
    staged: int
    """bits: handovers recorded as staged in the log"""
    placed: int
    """last handover whose placement is recorded as committed in the log; 0: none"""
    decided: tuple[int, ...]
    """bits, of each handover"""
    life: int
    left: Faults


class CellRecord(NamedTuple):
    """One cell: its use, the epoch and the form for which it is used, and what still fills it."""

    use: Cell
    epoch: int = 0
    form: int = 0
    filling: Filling = Filling()


class Flow(NamedTuple):
    """Transfer physically in progress, of one part."""

    cell: int
    part: int
    source: int
    """cell of the rank that is read"""


class Rank(NamedTuple):
    """One rank. A dead one has no protocol state and no cells."""

    protocol_state: ProtocolState | None
    steps: int
    """epoch that its steps serve; the agent learns of a flip later"""
    made: int
    """handover that created it; 0: none"""
    cells: tuple[CellRecord, ...]
    flows: tuple[Flow, ...]
    said: int
    """bits: which fact of which handover"""
    form: int = WHOLE
    """form of the layer that its steps serve"""
    next_form: int = WHOLE
    """form that the open or last handover leads to"""


class Around(NamedTuple):
    """All that a rank's steps depend on in other ranks."""

    offers: tuple[tuple[int, int], ...]
    """readable (cell, epoch) of the source of each part; (-1, -1): none, it is dead"""
    readers: tuple[int, ...]
    """bits of the cells that each peer reads here"""


class Own(NamedTuple):
    """Step of a rank, its transfers or its cells."""

    kind: Kind
    told: str
    after: Rank
    fault: str = ""
    """the allowed fault, if it is one"""


def fact_of(fact: int, handover: int) -> int:
    """Return the bit of a fact that a rank reports about a handover."""
    return 1 << (3 * handover + fact)


class Rules:
    """Rules of the real parties. Each may be broken to see the consequences."""

    decides_blindly = False
    """True: the decision is made without compare-and-set"""
    silence_ends_aborts = False
    """True: an abort finishes although ranks are silent; a rank found with it open later receives it again"""
    clears_strays = False
    """True: coordinators abort handovers that are open on a rank but over"""

    def meant(self, rank: ProtocolState, kind: int, handover: int, epoch: int) -> int:
        """Return the handover that a rank applies a command to."""
        return handover

    def heed(self, rank: ProtocolState, kind: int, token: int, handover: int, epoch: int) -> CommandVerdict:
        if kind == PROPOSE:
            return handle_propose(rank, token, handover, epoch)
        return handle_commit(rank, token, handover) if kind == COMMIT else handle_abort(rank, token, handover)

    def fenced(self, rank: ProtocolState, token: int) -> int:
        """Return the token that a rank assumes for a command."""
        return token

    def addressed(self, world: World, kind: int, handover: int) -> bool:
        """Return True if a command of a handover reaches the present ranks."""
        return world.handovers[handover - 1][0] == world.life

    def cell_after(self, state: Cell, event: CellEvent) -> Cell:
        return next_state(CELL, state, event)

    def after_part(self, use: Cell, filling: Filling) -> CellEvent | None:
        return after_part(use, filling)

    def given_up(self, use: Cell, filling: Filling) -> CellEvent:
        return given_up(use, filling)

    def reservable(self, use: Cell) -> bool:
        return use is Cell.FREE

    def reread(self, rank: Rank, flow: Flow) -> Rank | None:
        """Return a rank that reads an overdue part again into the same cell; None: it never does."""
        return None

    def drained(self, readers: Sequence[int], cell: int) -> bool:
        """Return True if a cell out of service is free. readers: bits of the cells that each peer leases."""
        return not any(leased >> cell & 1 for leased in readers)

    def form(self, epoch: int, token: int) -> int:
        """Return the form of an epoch in the proposal of a coordinator, where each handover turns the layer
        over."""
        return SHARDED if epoch % 2 else WHOLE

    def digest(self, rank: Rank) -> int:
        """Return the digest in a rank's step headers: of the placement, forms included, that it would serve
        under the epoch for which it is ready."""
        protocol_state = rank.protocol_state
        if protocol_state is not None and protocol_state.state is RankState.READY:
            return 2 * protocol_state.handover + rank.next_form
        return 2 * rank.made + rank.form

    def agree(self, ranks: list[Rank]) -> bool:
        """Return True if the step begins; False: the ranks mean different placements by one epoch."""
        ready, digests = [self.ready(rank) for rank in ranks], [self.digest(rank) for rank in ranks]
        return disagreement(ready, digests) is None

    def flipping(self, ranks: list[Rank]) -> list[int]:
        """Return the ranks that flip at this step: each decides on its own, from the same headers."""
        ready = tuple(self.ready(rank) for rank in ranks)
        return [at for at, rank in enumerate(ranks) if flips(rank.steps, ready)]

    def gone(self, world: World, handover: int) -> bool:
        """Return True if the incarnation of a handover has ended, as far as the coordinator knows."""
        return world.handovers[handover - 1][0] != world.life

    def refused_by_all(self, said: int, handover: int) -> bool:
        """Return True if a decided handover is aborted. said: the facts that all ranks have reported."""
        return bool(said & fact_of(GIVEN_UP, handover))

    def last_decided(self, world: World) -> int:
        """Return the handover whose placement a new incarnation starts with; 0: none."""
        state, number = world.key
        return number if state is CoordinatorState.COMMITTING else world.placed

    def gives_up(self, rank: Rank, protocol_state: ProtocolState) -> Rank | None:
        """Return the reaction of a rank that has staged and receives nothing; None: it waits."""
        return None

    def with_room(self, rank: Rank) -> Rank:
        """Make room for the next read of a rank."""
        return rank

    def ready(self, rank: Rank) -> int:
        """Return the ready epoch in its step headers."""
        protocol_state = rank.protocol_state
        return (
            protocol_state.served + 1
            if protocol_state is not None and protocol_state.state is RankState.READY
            else rank.steps
        )
