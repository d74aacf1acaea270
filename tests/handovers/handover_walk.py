"""Random walks through the world of `handover_parties`: first any events, then only those that must
happen."""

import random
from typing import Any

from fleet.handover import Cell, CoordinatorState, RankState
from tests.handovers.handover_fake_memory import SLOTS
from tests.handovers.handover_parties import Leader, World

PIECES = ("lead", "command", "answer", "errand", "flow", "step", "wait")


class Walk:
    def __init__(self, seed: int, world: type[World] = World) -> None:
        dice = random.Random(seed)
        self.world, self._dice = world(dice), dice
        self.deaths, self._leaders, self._silences = (
            dice.choice((0.0, 0.002)),
            dice.choice((0.0, 0.004)),
            dice.choice((0.0, 0.005, 0.05)),
        )
        self._late, self._settled, self._again = (
            dice.choice((0.0, 0.2, 0.6)),
            dice.choice((0.004, 0.3)),
            dice.choice((0.1, 0.3)),
        )
        self._often = tuple(dice.choice((most, most, 1)) for most in (4, 6, 6, 8, 4, 3, 1))

    def whatever(self, pieces: int) -> None:
        """Draw frequencies of events per walk, so that rare events coincide."""
        deaths, leaders, silences = (
            self.deaths,
            self.deaths + self._leaders,
            self.deaths + self._leaders + self._silences,
        )
        for _ in range(pieces):
            world, chance = self.world, self._dice.random()
            if chance < deaths and world.whole:
                world.kill(self._dice.choice(world.seats))
            elif chance < leaders:
                world.leaders = [*world.leaders[-2:], Leader(world.leaders[-1].token + 1)]
                world.tell(f"coordinator {world.leaders[-1].token} takes over")
            elif chance < silences and world.leaders[-1].proceeding is not None:
                world.leaders[-1].proceeding = world.leaders[-1].proceeding.checked(
                    silent=self._dice.random() < 0.5
                )
            else:
                self._piece(self._dice.choices(PIECES, self._chances())[0])
            world.check_served()

    def _chances(self) -> list[int]:
        world = self.world
        possible = (
            True,
            world.commands,
            world.answers,
            world.errands,
            world.flows,
            any(seat.ready for seat in world.seats),
            True,
        )
        return [often if can else 0 for often, can in zip(self._often, possible, strict=True)]

    def _piece(self, what: str) -> None:
        world, dice = self.world, self._dice
        match what:
            case "lead":
                leader = dice.choice(world.leaders)
                if leader is world.leaders[-1] or leader.proceeding is not None or dice.random() < 0.02:
                    world.lead(leader)
            case "command":
                world.deliver(*self._from_network(world.commands))
            case "answer":
                world.hear(*self._from_network(world.answers))
            case "errand":
                world.errands.pop(dice.randrange(len(world.errands)))[1]()
            case "flow":
                flow = dice.choice(world.flows)
                if not (flow.late or flow.is_local) and flow.source.alive and dice.random() < self._late:
                    world.delay(flow)
                elif not flow.late or dice.random() < self._settled:
                    world.land(flow)
            case "step":
                world.step()
            case "wait":
                if not world.whole and dice.random() < 0.5:
                    world.begin_life()
                world.wait(dice.uniform(0.0, 0.25))

    def _from_network(self, messages: list[Any]) -> Any:
        """Take a message in transit. It may be repeated, and is lost if it waits too long."""
        while len(messages) > 40:
            messages.pop(self._dice.randrange(len(messages)))
        at = self._dice.randrange(len(messages))
        return messages[at] if self._dice.random() < self._again else messages.pop(at)

    def calm(self, rounds: int = 400) -> None:
        """Run without faults, with one coordinator, until everything has ended."""
        world = self.world
        world.faults = False
        if not world.whole:
            world.begin_life()
        world.leaders = [Leader(world.leaders[-1].token + 1)]
        world.commands, world.answers = [], []
        for _ in range(rounds):
            world.lead(world.leaders[0])
            for message in (*world.commands,):
                world.deliver(*message)
            for answer in world.answers:
                world.hear(*answer)
            world.commands, world.answers = [], []
            for _ in range(len(world.errands)):
                world.errands.pop(0)[1]()
            for flow in (*world.flows,):
                if flow in world.flows:
                    world.land(flow)
            world.step()
            world.wait(0.3)
            if self.at_rest:
                return
        raise world.unsafe(f"it does not come to rest: {self._open()}")

    @property
    def at_rest(self) -> bool:
        world = self.world
        return (
            (world.open is None or world.open.state is CoordinatorState.IDLE)
            and not (world.errands or world.flows)
            and all(
                seat.protocol.at_rest
                and seat.protocol.protocol_state.state is RankState.SERVING
                and seat.cell_table.count(Cell.FREE) == SLOTS
                and not seat.cell_table.leases
                for seat in world.seats
            )
        )

    def _open(self) -> str:
        world = self.world
        ranks = "; ".join(
            f"rank {seat.rank} {seat.protocol.protocol_state}, {seat.cell_table.summary()}, {seat.cell_table.leases}"
            " leases"
            for seat in world.seats
        )
        return f"the key says {world.open}; {ranks}; {len(world.flows)} reads, {len(world.errands)} errands"
