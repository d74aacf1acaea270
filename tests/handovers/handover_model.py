"""All parties of a handover as one model for `exploration.explore`. Rules and tables are those of
`fleet.handover`; the world around them is defined here.

The world: every part is modelled as follows.

- *Ranks* form a ring: in each handover every rank reads its expert of the next epoch from the rank before it.
  So every rank is reader and source at once, and its own expert is evicted. States that differ only by a
  rotation of the ring are one state.
- *Turns.* In worlds that turn the layer over (`Size.turns`), every handover changes its form, and a cell is
  filled part by part from all ranks, its own included. Whole, a rank has all parts of one expert; sharded, its
  part of every expert. A part has one source, so its loss fails the handover. A rank's copy within its own
  memory is a transfer like others, but it needs no lease: should its source be used again, then what it copies
  lands in a quarantined cell.
- *Headers.* A step begins only if the ranks mean one placement by each epoch; otherwise the engine stops, and
  is restarted.
- *Cells.* A rank has one slot and some further cells. `flows` are the transfers physically in progress,
  whatever the protocol state says: bytes that arrive in a cell here and are read from a cell there. A flow
  ends when it lands, when it settles, or with a process.
- *Messages* are in a set that only grows, and may be received at any time, many times or never: so loss,
  duplication and reordering need no events of their own. Commands are addressed to one incarnation of the
  engine. Of answers, only the facts in them are kept, which stay true.
- *The store* holds the key, changed by compare-and-set, and the log. A number is used once, so (state,
  number) stands for the key's revision.
- *Coordinators.* Each new one has a higher token. Its predecessors may keep running and sending indefinitely;
  a crashed one is one that does nothing any more. The worst is assumed: all read durable state at once, so
  that everything any of them could ever send is sent, and each may have read nothing for a long time. So
  coordinators need not be distinguished, except by the tokens of their messages.
- *Deaths.* A rank dies alone. Its peers continue to receive commands and to read, but no step runs without
  it. Then the engine is restarted as a whole, as a new incarnation, with the last decided state of the store.

Steps that must happen eventually (DUE): those of ranks, transfers and restarts, those of any coordinator that
knows the durable state, and messages of the newest one.
"""

from collections.abc import Iterator

from fleet.handover import Cell, CoordinatorState, RankState
from tests.handovers.exploration import Kind, Step, Told
from tests.handovers.handover_coordinators import Coordinators
from tests.handovers.handover_ranks import Ranks
from tests.handovers.handover_world import (
    ABORTED_BIT,
    COMMITTED_BIT,
    NAMES,
    SHARDED,
    Around,
    Rank,
    Size,
    State,
    World,
)


class Handovers(Coordinators, Ranks):
    """The model."""

    strict = False
    """True: a cell that is free too early is wrong, even before it is used again"""

    def __init__(self, size: Size) -> None:
        Coordinators.__init__(self, size.handovers)
        Ranks.__init__(self, size)
        self._ranks: list[Rank] = []
        self._number_of_rank: dict[Rank, int] = {}
        self._named = tuple(range(size.ranks)) if size.turns else (1,)
        """distances of the ranks that a sentence about a rank may name"""
        self.stops = 0
        """steps that began with headers of different placements for one epoch"""

    # --- the model's interface ---

    def start(self) -> State:
        world = World((CoordinatorState.IDLE, 0), (), 1, 0, 0, 0, (), 1, self.size.faults)
        return (self.world_number(world), *[self.rank_number(self.born(0, 0, 0))] * self.size.ranks)

    def canonical(self, state: State) -> State:
        world, *ranks = state
        least = min(ranks)
        turned = (tuple(ranks[at:] + ranks[:at]) for at, rank in enumerate(ranks) if rank == least)
        return (world, *min(turned))

    def ended(self, state: State) -> bool:
        world, ranks = self.worlds[state[0]], [self._ranks[number] for number in state[1:]]
        at_rest = all(
            rank.protocol_state is not None
            and rank.protocol_state.state is RankState.SERVING
            and not rank.flows
            and sorted(record.use for record in rank.cells)
            == sorted([Cell.LIVE] + [Cell.FREE] * (self.size.cells - 1))
            for rank in ranks
        )
        return at_rest and world.key[0] is CoordinatorState.IDLE

    def steps(self, state: State) -> Iterator[Step[State]]:
        world_number, ranks = state[0], state[1:]
        world = self.worlds[world_number]
        yield from self._conducted(world_number, world, ranks)
        for at in range(len(ranks)):
            yield from self._commanded(state, at)
            yield from self._by_itself(state, at)
        yield from self._together(state)

    # --- coordinators ---

    def _conducted(self, number: int, world: World, ranks: tuple[int, ...]) -> Iterator[Step[State]]:
        said = self._ranks[ranks[0]].said
        for rank in ranks[1:]:
            said &= self._ranks[rank].said
        known = self.known.get(("conducted", number, said))
        if known is None:
            known = self.known["conducted", number, said] = [
                (kind, told, self.world_number(after))
                for kind, told, after in self.coordinators_steps(world, said)
            ]
        for kind, told, after in known:
            yield Step(kind, told, (after, *ranks))
        alive = all(self._ranks[rank].protocol_state is not None for rank in ranks)
        if world.key[0] is CoordinatorState.IDLE and len(world.handovers) < self.size.handovers and alive:
            told, after = self.begun(world, self._ranks[ranks[0]].steps + 1)
            yield Step(Kind.MAY, told, (self.world_number(after), *ranks))

    # --- ranks and commands ---

    def _commanded(self, state: State, at: int) -> Iterator[Step[State]]:
        rank = state[1 + at]
        if self._ranks[rank].protocol_state is None:
            return
        around = self._around(state, at)
        for due, kind, token, handover, epoch in self.letters(state[0]):
            after = self._after_command(rank, kind, token, handover, epoch, around)
            if after != rank:
                told = (
                    "rank {} hears {} of handover {} from coordinator {}",
                    (at, NAMES[kind], handover, token),
                )
                yield Step(due, told, (*state[: 1 + at], after, *state[2 + at :]))

    def _after_command(
        self, number: int, kind: int, token: int, handover: int, epoch: int, around: Around
    ) -> int:
        key = ("command", number, kind, token, handover, epoch, around)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self.rank_number(
                self.obeyed(self._ranks[number], kind, token, handover, epoch, around)
            )
        return known

    # --- autonomous steps of ranks and transfers ---

    def _by_itself(self, state: State, at: int) -> Iterator[Step[State]]:
        world, count, around = self.worlds[state[0]], self.size.ranks, self._around(state, at)
        key = ("own", state[1 + at], around)
        known = self.known.get(key)
        if known is None:
            rank = self._ranks[state[1 + at]]
            own = [] if rank.protocol_state is None else self.own(rank, rank.protocol_state, around)
            known = self.known[key] = [(one, self.rank_number(one.after)) for one in own]
        for one, after in known:
            new = state[0]
            if one.fault:
                allowed = getattr(world.left, one.fault)
                if not allowed:
                    continue
                new = self.world_number(world._replace(left=world.left._replace(**{one.fault: allowed - 1})))
            yield Step(
                one.kind,
                (one.told, (at, *[(at - distance) % count for distance in self._named])),
                (new, *state[1 : 1 + at], after, *state[2 + at :]),
            )

    def _around(self, state: State, at: int) -> Around:
        ranks = state[1:]
        offers = tuple(self._offer(ranks[at - distance]) for distance in self.size.sources)
        readers = tuple(
            self._reads(ranks[(at + distance) % len(ranks)], part)
            for part, distance in enumerate(self.size.sources)
            if distance
        )
        return Around(offers, readers)

    def _offer(self, number: int) -> tuple[int, int]:
        """Return the rank's readable (cell, epoch); (-1, -1): none, it is dead."""
        live = [
            (cell, record.epoch)
            for cell, record in enumerate(self._ranks[number].cells)
            if record.use is Cell.LIVE
        ]
        return live[0] if live else (-1, -1)

    def _reads(self, number: int, part: int) -> int:
        """Return the cells from which a rank reads a part, as bits."""
        return sum({1 << flow.source for flow in self._ranks[number].flows if flow.part == part})

    # --- steps of the whole engine ---

    def _together(self, state: State) -> Iterator[Step[State]]:
        world, ranks = self.worlds[state[0]], [self._ranks[number] for number in state[1:]]
        if any(rank.protocol_state is None for rank in ranks):
            yield Step(Kind.DUE, *self._restarted(world, ranks))
        elif any(self.ready(rank) > rank.steps for rank in ranks):
            yield from self._headers(state, ranks)
        if world.left.deaths:
            left = self.world_number(world._replace(left=world.left._replace(deaths=world.left.deaths - 1)))
            for at, rank in enumerate(ranks):
                if rank.protocol_state is not None:
                    dead = self.rank_number(Rank(None, 0, 0, (), (), rank.said))
                    yield Step(
                        Kind.FAULT,
                        ("rank {} dies", (at,)),
                        (left, *state[1 : 1 + at], dead, *state[2 + at :]),
                    )

    def _headers(self, state: State, ranks: list[Rank]) -> Iterator[Step[State]]:
        """Yield what the headers of the next step lead to."""
        if not self.agree(ranks):
            stopped = [self.rank_number(Rank(None, 0, 0, (), (), rank.said)) for rank in ranks]
            self.stops += 1
            yield Step(
                Kind.DUE,
                ("the headers name two placements for one epoch: the engine stops before it computes", ()),
                (state[0], *stopped),
            )
        elif flipping := self.flipping(ranks):
            after = [
                self.rank_number(_flipped(rank)) if at in flipping else state[1 + at]
                for at, rank in enumerate(ranks)
            ]
            yield Step(
                Kind.DUE,
                ("the step begins: {} over to the next epoch", (_names(flipping),)),
                (state[0], *after),
            )

    def _restarted(self, world: World, ranks: list[Rank]) -> tuple[Told, State]:
        made = self.last_decided(world)
        epoch = world.handovers[made - 1][1] if made else 0
        born = [self.rank_number(self.born(epoch, made, rank.said)) for rank in ranks]
        return ("the engine begins a new life, with epoch {}", (epoch,)), (
            self.world_number(world._replace(life=world.life + 1)),
            *born,
        )

    # --- invariants ---

    def wrong(self, state: State) -> str:
        key = ("ranks", *state[1:])
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self._wrong_ranks([self._ranks[number] for number in state[1:]])
        if known:
            return str(known)
        world = self.worlds[state[0]]
        if COMMITTED_BIT | ABORTED_BIT in world.decided:
            return "a handover is both committed and aborted"
        served = {
            rank.made
            for rank in (self._ranks[number] for number in state[1:])
            if rank.made and rank.protocol_state is not None
        }
        if any(not world.decided[made - 1] & COMMITTED_BIT for made in served):
            return "an epoch is served that was never decided"
        return ""

    def _wrong_ranks(self, ranks: list[Rank]) -> str:
        alive = [rank for rank in ranks if rank.protocol_state is not None]
        if len({rank.steps for rank in alive}) > 1:
            return "ranks serve different epochs in one step"
        if len({(rank.made, rank.form) for rank in alive}) > 1:
            return "ranks serve different placements as one epoch in one step"
        for at, rank in enumerate(ranks):
            wrong = self._wrong_flows(rank, self._readers_of(ranks, at)) or _wrong_service(rank)
            if wrong:
                return wrong
        if len(alive) == len(ranks) and len(self._held(ranks)) < len(ranks) * len(self.size.sources):
            return "the last verified copy of an expert is gone"
        return ""

    def _readers_of(self, ranks: list[Rank], at: int) -> set[int]:
        """Return the cells of a rank that its peers still read."""
        return {
            flow.source
            for other, rank in enumerate(ranks)
            for flow in rank.flows
            if other != at and (other - self.size.sources[flow.part]) % len(ranks) == at
        }

    def _wrong_flows(self, rank: Rank, read: set[int]) -> str:
        landing = [(flow.cell, flow.part) for flow in rank.flows]
        if len(set(landing)) < len(landing):
            return "a cell is used again while bytes of an earlier read still land in it"
        for cell, part in landing:
            record = rank.cells[cell]
            if record.use is not Cell.FREE and not record.filling.reading >> part & 1:
                return "bytes land in a cell that is in use"
            if record.use is Cell.FREE and self.strict:
                return "a cell is free while bytes still land in it"
            if cell in read:
                return "a cell is used again while another rank still reads from it"
        if self.strict and any(rank.cells[cell].use is Cell.FREE for cell in read if rank.cells):
            return "a cell is free while another rank still reads from it"
        return ""

    def _held(self, ranks: list[Rank]) -> set[tuple[int, int]]:
        """Return the verified (expert, part) of all ranks. Every part of an expert that moves whole is one."""
        count, held = len(ranks), set()
        for at, rank in enumerate(ranks):
            for record in rank.cells:
                if record.use in (Cell.LIVE, Cell.STAGED) and not self.size.turns:
                    held.add(((at - record.epoch) % count, 0))
                elif record.use in (Cell.LIVE, Cell.STAGED):
                    held |= {(other, at) if record.form == SHARDED else (at, other) for other in range(count)}
        return held

    def wrong_step(self, before: State, after: State) -> str:
        if self.worlds[before[0]].life != self.worlds[after[0]].life:
            return ""
        for earlier, later in zip(before[1:], after[1:], strict=True):
            if earlier != later and self._shrunk(self._ranks[earlier], self._ranks[later]):
                return "within a life, an epoch or a token went back"
        return ""

    def _shrunk(self, earlier: Rank, later: Rank) -> bool:
        if earlier.protocol_state is None or later.protocol_state is None:
            return False
        return later.steps < earlier.steps or any(
            now < then
            for now, then in zip(later.protocol_state[1:3], earlier.protocol_state[1:3], strict=True)
        )

    # --- numbers for values, so that states are small ---

    def rank_number(self, rank: Rank) -> int:
        number = self._number_of_rank.get(rank)
        if number is None:
            number = self._number_of_rank[rank] = len(self._ranks)
            self._ranks.append(rank)
        return number


def _flipped(rank: Rank) -> Rank:
    assert rank.protocol_state is not None
    return rank._replace(steps=rank.steps + 1, made=rank.protocol_state.handover, form=rank.next_form)


def _wrong_service(rank: Rank) -> str:
    serving = [
        record
        for record in rank.cells
        if record.epoch == rank.steps and record.use in (Cell.LIVE, Cell.STAGED)
    ]
    return "a part is served that was never verified" if any(one.filling.uses_cell for one in serving) else ""


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]} goes" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} go"
