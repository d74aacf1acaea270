"""All parties of a handover as one model for `exploration.explore`. Rules and tables are those of
`fleet.handover`; the world around them is defined here.

The world: every part is modelled as follows.

- *Ranks* form a ring: in each handover every rank reads its expert of the next epoch from the rank before it.
  So every rank is reader and source at once, and its own expert is evicted. States that differ only by a
  rotation of the ring are one state.
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
    Rank,
    Size,
    State,
    World,
)


class Handovers(Coordinators, Ranks):
    """The model."""

    def __init__(self, size: Size) -> None:
        Coordinators.__init__(self, size.handovers)
        Ranks.__init__(self, size)
        self._ranks: list[Rank] = []
        self._number_of_rank: dict[Rank, int] = {}

    # --- the model's interface ---

    def start(self) -> State:
        world = World((CoordinatorState.IDLE, 0), (), 1, 0, 0, 0, (), 1, self.size.faults)
        return (self.world_number(world), *[self._rank(self.born(0, 0, 0))] * self.size.ranks)

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
            and sorted(use for use, _ in rank.cells)
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
        for due, kind, token, handover, epoch in self.letters(state[0]):
            after = self._after_command(
                rank, kind, token, handover, epoch, self._offer(state[1 + (at - 1) % self.size.ranks])
            )
            if after != rank:
                told = (
                    "rank {} hears {} of handover {} from coordinator {}",
                    (at, NAMES[kind], handover, token),
                )
                yield Step(due, told, (*state[: 1 + at], after, *state[2 + at :]))

    def _after_command(
        self, number: int, kind: int, token: int, handover: int, epoch: int, offer: tuple[int, int]
    ) -> int:
        key = ("command", number, kind, token, handover, epoch, offer)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self._rank(
                self.obeyed(self._ranks[number], kind, token, handover, epoch, offer)
            )
        return known

    # --- autonomous steps of ranks and transfers ---

    def _by_itself(self, state: State, at: int) -> Iterator[Step[State]]:
        world, count = self.worlds[state[0]], self.size.ranks
        before, behind = state[1 + (at - 1) % count], state[1 + (at + 1) % count]
        key = ("own", state[1 + at], self._offer(before), self._readers(behind))
        known = self.known.get(key)
        if known is None:
            rank = self._ranks[state[1 + at]]
            own = (
                []
                if rank.protocol_state is None
                else list(self.own(rank, rank.protocol_state, self._offer(before), self._readers(behind)))
            )
            known = self.known[key] = [(one, self._rank(one.after)) for one in own]
        for one, after in known:
            new = state[0]
            if one.fault:
                allowed = getattr(world.left, one.fault)
                if not allowed:
                    continue
                new = self.world_number(world._replace(left=world.left._replace(**{one.fault: allowed - 1})))
            yield Step(
                one.kind,
                (one.told, (at, (at - 1) % count)),
                (new, *state[1 : 1 + at], after, *state[2 + at :]),
            )

    def _offer(self, number: int) -> tuple[int, int]:
        """Return the rank's readable (cell, epoch); (-1, -1): none, it is dead."""
        live = [
            (cell, epoch) for cell, (use, epoch) in enumerate(self._ranks[number].cells) if use is Cell.LIVE
        ]
        return live[0] if live else (-1, -1)

    def _readers(self, number: int) -> int:
        """Return the cells that a rank reads from the one before it, as bits."""
        return sum({1 << there for _, there in self._ranks[number].flows})

    # --- steps of the whole engine ---

    def _together(self, state: State) -> Iterator[Step[State]]:
        world, ranks = self.worlds[state[0]], [self._ranks[number] for number in state[1:]]
        if any(rank.protocol_state is None for rank in ranks):
            yield Step(Kind.DUE, *self._restarted(world, ranks))
        elif flipping := self._flipping(state[1:], ranks):
            after = [
                (
                    self._rank(rank._replace(steps=rank.steps + 1, made=rank.protocol_state.handover))
                    if at in flipping and rank.protocol_state
                    else state[1 + at]
                )
                for at, rank in enumerate(ranks)
            ]
            yield Step(
                Kind.DUE,
                ("the step begins: {} over to the next epoch", (_names(flipping),)),
                (state[0], *after),
            )
        if world.left.deaths:
            left = self.world_number(world._replace(left=world.left._replace(deaths=world.left.deaths - 1)))
            for at, rank in enumerate(ranks):
                if rank.protocol_state is not None:
                    dead = self._rank(Rank(None, 0, 0, (), (), rank.said))
                    yield Step(
                        Kind.FAULT,
                        ("rank {} dies", (at,)),
                        (left, *state[1 : 1 + at], dead, *state[2 + at :]),
                    )

    def _flipping(self, numbers: tuple[int, ...], ranks: list[Rank]) -> list[int]:
        return self.flipping(ranks) if any(self.ready(rank) > rank.steps for rank in ranks) else []

    def _restarted(self, world: World, ranks: list[Rank]) -> tuple[Told, State]:
        made = self.last_decided(world)
        epoch = world.handovers[made - 1][1] if made else 0
        born = [self._rank(self.born(epoch, made, rank.said)) for rank in ranks]
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
        for at, rank in enumerate(ranks):
            landing = [here for here, _ in rank.flows]
            if len(set(landing)) < len(landing):
                return "a cell is used again while bytes of an earlier read still land in it"
            if any(
                rank.cells[here][0] not in (Cell.PULLING, Cell.QUARANTINED, Cell.FREE) for here in landing
            ):
                return "bytes land in a cell that is in use"
            if set(landing) & {there for _, there in ranks[(at + 1) % len(ranks)].flows}:
                return "a cell is used again while another rank still reads from it"
        if len(alive) == len(ranks):
            held = {
                (at - epoch) % len(ranks)
                for at, rank in enumerate(ranks)
                for use, epoch in rank.cells
                if use in (Cell.LIVE, Cell.STAGED)
            }
            if len(held) < len(ranks):
                return "the last verified copy of an expert is gone"
        return ""

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

    def _rank(self, rank: Rank) -> int:
        number = self._number_of_rank.get(rank)
        if number is None:
            number = self._number_of_rank[rank] = len(self._ranks)
            self._ranks.append(rank)
        return number


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]} goes" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} go"
