"""What the model of handovers is made of: the world in compact values, and the rules that its parties keep. See `handover_model`."""

from typing import NamedTuple

from fleet.handover import (
    CELL,
    Cell,
    CellEvent,
    CommandVerdict,
    CoordinatorState,
    ProtocolState,
    RankState,
    flips,
    heed_abort,
    heed_commit,
    heed_propose,
    moved,
)
from tests.fleet.exploration import Kind

PROPOSE, COMMIT, ABORT = range(3)
NAMES = ("the proposal", "the commit", "the abort")
STAGED, FLIPPED, GIVEN_UP = range(3)
"""facts that ranks tell"""
COMMITTED_BIT, ABORTED_BIT = 1, 2
State = tuple[int, ...]
"""number of the world, then of each rank"""


class Faults(NamedTuple):
    """How many there may be."""

    leaders: int = 0
    """coordinators that come after the first"""
    deaths: int = 0
    overdue: int = 0
    corrupted: int = 0


class Size(NamedTuple):
    ranks: int
    handovers: int
    cells: int
    """of a rank, the slot's among them"""
    faults: Faults
    verified_at_once: bool = False
    """that bytes land and that they are verified is one step: fewer states"""


class World(NamedTuple):
    """All but the ranks."""

    key: tuple[CoordinatorState, int]
    """durable: the state, and the handover that it is about, or was about last"""
    handovers: tuple[tuple[int, int], ...]
    """of each that was begun: the life it is for, and the epoch that it makes"""
    coordinators: int
    """how many there have been, and so the highest token"""
    sent: int
    """bits: which command, token and handover"""
    staged: int
    """bits: of which handovers the log says that they were staged"""
    placed: int
    """last handover of which the log says that its placement was committed; 0: none"""
    decided: tuple[int, ...]
    """bits, of each handover"""
    life: int
    left: Faults


class Rank(NamedTuple):
    """One rank. A dead one has neither standing nor cells."""

    standing: ProtocolState | None
    steps: int
    """epoch that its steps serve; the agent hears of a flip later"""
    made: int
    """the handover that made it; 0: none"""
    cells: tuple[tuple[Cell, int], ...]
    """what each is in use for, and the epoch for whose sake"""
    flows: tuple[tuple[int, int], ...]
    """under way: (cell here, cell of the rank before)"""
    said: int
    """bits: which fact of which handover"""


class Own(NamedTuple):
    """Something that a rank, its transfers or its cells do."""

    kind: Kind
    told: str
    after: Rank
    fault: str = ""
    """which of the allowed faults it is"""


def fact_of(fact: int, handover: int) -> int:
    """The bit of a fact that a rank tells of a handover."""
    return 1 << (3 * handover + fact)


class Rules:
    """The rules as the real parties keep them. Each may be broken, to see what comes of it."""

    decides_blindly = False
    """whether the decision is made without compare-and-set"""
    silence_ends_aborts = False
    """whether an abort is over when ranks are silent for long; who is found with it open later is told again"""
    clears_strays = False
    """whether coordinators tell ranks to abort that have a handover open which is over"""

    def meant(self, rank: ProtocolState, kind: int, handover: int, epoch: int) -> int:
        """Which handover a rank takes a command to be about."""
        return handover

    def heed(self, rank: ProtocolState, kind: int, token: int, handover: int, epoch: int) -> CommandVerdict:
        if kind == PROPOSE:
            return heed_propose(rank, token, handover, epoch)
        return heed_commit(rank, token, handover) if kind == COMMIT else heed_abort(rank, token, handover)

    def fenced(self, rank: ProtocolState, token: int) -> int:
        """The token that a rank takes a command to have."""
        return token

    def addressed(self, world: World, kind: int, handover: int) -> bool:
        """Whether a command of a handover reaches the ranks that live now."""
        return world.handovers[handover - 1][0] == world.life

    def cell_after(self, state: Cell, event: CellEvent) -> Cell:
        return moved(CELL, state, event)

    def drained(self, readers: int, cell: int) -> bool:
        """Whether a cell that is served no more is free. readers: bits of the cells in which leases are."""
        return not readers >> cell & 1

    def flipping(self, ranks: list[Rank]) -> list[int]:
        """Which ranks go over at this step: each decides by itself, from the same headers."""
        ready = tuple(self.ready(rank) for rank in ranks)
        return [at for at, rank in enumerate(ranks) if flips(rank.steps, ready)]

    def gone(self, world: World, handover: int) -> bool:
        """Whether the life that a handover is for is over, as the coordinator knows it."""
        return world.handovers[handover - 1][0] != world.life

    def last_decided(self, world: World) -> int:
        """The handover whose placement a new life begins with; 0: none."""
        state, number = world.key
        return number if state is CoordinatorState.COMMITTING else world.placed

    def gives_up(self, rank: Rank, standing: ProtocolState) -> Rank | None:
        """What becomes of a rank that has staged and hears nothing; None: it waits."""
        return None

    def with_room(self, rank: Rank) -> Rank:
        """What a rank does to have a cell for what it is about to read."""
        return rank

    def ready(self, rank: Rank) -> int:
        """What its step headers say."""
        standing = rank.standing
        return standing.served + 1 if standing is not None and standing.state is RankState.READY else rank.steps
