"""Worker processes of an engine that moves its experts itself: each holds a map, and all vote for it at their
steps as the plugin does. And a `Rearranger` that reaches them over links that a test may break.
"""

import asyncio
from dataclasses import dataclass

from engine_adapter.engine import WorkerMap
from engine_adapter.vllm.wire import map_digest
from fleet.handover import Ballot, passes
from fleet.placement import Placement

NO_BALLOT = Ballot(0, "", "")


def digest(placement: Placement) -> str:
    return map_digest(placement.expert_of_slot, placement.experts)


@dataclass(eq=False)
class Worker:
    """One worker process. It keeps its state while its process lives, whatever becomes of the agent."""

    map: Placement
    """in force"""
    held: Placement | None = None
    voting: bool = False
    handover: int = 0
    """of the map that is held or was dropped"""
    past: int = 0
    """highest number that was held, dropped or carried out"""
    flipped: int = 0
    reason: str = ""
    dropped_voting: bool = False
    cast: Ballot | None = None
    """ballot of a vote whose result is not known yet: messages must wait"""
    layers_done: int = 0
    passed: bool = False
    """the vote has passed, and the map comes into force layer by layer"""

    def stage(self, handover: int, placement: Placement, replaces: str) -> None:
        if handover <= self.past or self.voting:
            return
        self.handover = self.past = handover
        self.held, self.voting, self.reason, self.dropped_voting = None, False, "", False
        if replaces != digest(self.map):
            self.reason = f"the map {digest(self.map)} is in force, not {replaces}"
        else:
            self.held = placement

    def permit(self, handover: int) -> None:
        if self.held is not None and handover == self.handover:
            self.voting = True

    def drop(self, handover: int, reason: str) -> None:
        if self.passed:
            return
        if self.held is not None and handover == self.handover:
            self.dropped_voting, self.held, self.voting, self.reason = self.voting, None, False, reason
        elif handover > self.past and self.held is None:
            self.handover = self.past = handover
            self.dropped_voting, self.reason = False, reason

    @property
    def ballot(self) -> Ballot:
        if self.held is None or not self.voting or self.passed:
            return NO_BALLOT
        return Ballot(self.handover, digest(self.held), digest(self.map))

    def commit_layer(self) -> None:
        """Bring one more layer of the map that has passed into force."""
        self.layers_done += 1
        if self.layers_done == self.map.layers:
            self.carry_out()

    def carry_out(self) -> None:
        assert self.held is not None
        self.passed, self.layers_done = False, 0
        self.map, self.held, self.voting, self.reason = self.held, None, False, ""
        self.flipped = self.handover

    @property
    def status(self) -> WorkerMap:
        held = self.held is not None
        state = (
            "voting" if self.voting else "staged" if held else "refused" if self.dropped_voting else "idle"
        )
        return WorkerMap(
            state=state,  # type: ignore[arg-type]
            handover=self.handover,
            digest="" if self.held is None else digest(self.held),
            served=digest(self.map),
            flipped=self.flipped,
            epoch=self.map.epoch,
            reason=self.reason,
            layers_done=self.layers_done,
        )


class Voters:
    """All worker processes of one start of an engine. `maps` lists every map that came into force."""

    def __init__(self, placement: Placement, *, by_layers: bool = False) -> None:
        """by_layers: True for asynchronous EPLB, which commits one layer per step."""
        self._by_layers = by_layers
        self.workers = [Worker(placement) for _ in range(placement.ranks)]
        self.maps = [placement]
        self.links: list[Links] = []

    def step(self) -> bool:
        """Make one step, with a vote. Return True if it passed."""
        passed = passes([worker.ballot for worker in self.workers])
        for worker in self.workers:
            if worker.passed:
                worker.commit_layer()
            elif passed and self._by_layers:
                worker.passed = True
            elif passed:
                worker.carry_out()
        if self.workers[0].map is not self.maps[-1]:
            served = {digest(worker.map) for worker in self.workers}
            assert len(served) == 1, "the workers serve different maps"
            self.maps.append(self.workers[0].map)
        self.report()
        return passed

    def report(self) -> None:
        for links in self.links:
            for rank in range(len(self.workers)):
                links.report(rank)

    async def run(self, seconds: float = 0.05) -> None:
        """Make steps until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(seconds)


class Links:
    """A `Rearranger`: the links of one agent process to the workers. Another agent makes new ones."""

    def __init__(self, voters: Voters) -> None:
        self.fault = ""
        self.lost: set[int] = set()
        """ranks to which messages get lost"""
        self.mute: set[int] = set()
        """ranks whose statuses get lost"""
        self.away: set[int] = set()
        """ranks whose workers are not connected"""
        self.nudges = 0
        self.sent: list[tuple[str, int, int]] = []
        """(message, rank, handover)"""
        self.steps_when_nudged = True
        self._voters = voters
        self._statuses: list[WorkerMap | None] = [worker.status for worker in voters.workers]
        self._changed = asyncio.Event()
        self._maps = {digest(worker.map): worker.map for worker in voters.workers}
        self._placement = voters.workers[0].map
        voters.links.append(self)

    @property
    def ranks(self) -> int:
        return len(self._voters.workers)

    @property
    def placement(self) -> Placement:
        served = {status.served for status in self._statuses if status is not None}
        if len(served) == 1:
            self._placement = self._maps.get(served.pop(), self._placement)
        return self._placement

    def status(self, rank: int) -> WorkerMap | None:
        return None if rank in self.away else self._statuses[rank]

    def stage(self, rank: int, handover: int, placement: Placement) -> None:
        self._maps[digest(placement)] = placement
        if self._arrives("stage", rank, handover):
            self._voters.workers[rank].stage(handover, placement, digest(self.placement))
            self.report(rank)

    def permit(self, rank: int, handover: int) -> None:
        if self._arrives("permit", rank, handover):
            self._voters.workers[rank].permit(handover)
            self.report(rank)

    def drop(self, rank: int, handover: int, reason: str) -> None:
        if self._arrives("drop", rank, handover):
            self._voters.workers[rank].drop(handover, reason)
            self.report(rank)

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def nudge(self) -> None:
        self.nudges += 1
        if self.steps_when_nudged:
            self._voters.step()

    def report(self, rank: int) -> None:
        """Deliver a worker's status."""
        if rank not in self.mute and rank not in self.away:
            self._statuses[rank] = self._voters.workers[rank].status
            self._changed.set()

    def reconnect(self, rank: int) -> None:
        self.away.discard(rank)
        self.report(rank)

    def _arrives(self, message: str, rank: int, handover: int) -> bool:
        self.sent.append((message, rank, handover))
        return rank not in self.lost and rank not in self.away
