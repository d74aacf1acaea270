"""The real coordinator and the real agent of an engine that moves its experts itself, against each other and
against workers that vote, under all faults of networks and processes.
"""

from typing import Any

import pytest

from engine_adapter.handover.vote_protocol import Drop, Effect, VoteProtocol
from fleet.handover import CommandVerdict
from fleet.placement import Placement
from fleet.requests.handovers import AbortHandover, HandoverDescribed
from migration.handover import coordinator, rank_progress
from migration.handover.coordinator import HandoverState, OpenHandover
from migration.handover.rank_progress import RankProgress
from tests.handovers import vote_parties
from tests.handovers.handover_fake_memory import Unsafe
from tests.handovers.vote_parties import VoteWalk, VoteWorld
from tests.voting_workers import Worker


def walked(seeds: range, pieces: int, world: type[VoteWorld] = VoteWorld) -> tuple[int, int]:
    """Count the maps that came into force, and the decided handovers that all refused, on walks from these
    seeds. Unsafe, or a party's own error, with the seed."""
    flips = refusals = 0
    for seed in seeds:
        walk = VoteWalk(seed, world)
        try:
            walk.whatever(pieces)
            walk.calm()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        flips += walk.world.flips
        refusals += len(walk.world.refused)
    return flips, refusals


def test_whatever_happens_on_the_way_the_parties_keep_every_promise_and_come_to_rest() -> None:
    flips, refusals = walked(range(40), 1500)
    assert flips > 60, "hardly any handover came to its end"
    assert refusals > 3, "hardly any decided handover was refused"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_on_many_long_walks() -> None:
    flips, refusals = walked(range(1000, 1150), 4000)
    assert flips > 400
    assert refusals > 100


class _AnybodyWrites(VoteWorld):
    """The store accepts every write."""

    def claim(self, value: OpenHandover, revision: int | None) -> bool:
        return super().claim(value, None if self.key is None else self.revision)


class _NoVote(VoteWorld):
    """A worker that is permitted carries out its map in its next step."""

    def step(self) -> None:
        for worker in self.workers:
            if worker.voting:
                worker.carry_out()
        self.check_served()


@pytest.mark.parametrize(
    ("world", "promise"),
    [
        (_AnybodyWrites, "was not decided|was aborted|goes on, though|does not come to rest|two maps"),
        (_NoVote, "different maps in one step"),
    ],
)
def test_a_walk_notices_when_the_world_lacks_a_rule(world: type[VoteWorld], promise: str) -> None:
    with pytest.raises(Unsafe, match=promise):
        walked(range(300), 1500, world)


class _OnlyAbortsDrop(VoteProtocol):
    """Workers are asked to drop a map when a coordinator aborts it, and for no other reason."""

    def __init__(self, *, worker_id: int, placement: Placement) -> None:
        super().__init__(worker_id=worker_id, placement=placement)
        self.aborted: set[tuple[int, int]] = set()

    def abort(self, command: AbortHandover) -> CommandVerdict:
        self.aborted.add((command.rank, command.handover))
        return super().abort(command)

    def drain(self) -> list[Effect]:
        return [
            effect
            for effect in super().drain()
            if not isinstance(effect, Drop) or (effect.rank, effect.handover) in self.aborted
        ]


def _others_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vote_parties, "VoteProtocol", _OnlyAbortsDrop)


def _numbers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Worker.stage

    def stage(self: Worker, handover: int, placement: Placement, replaces: str) -> None:
        if self.held is None and handover > self.flipped:
            self.past = 0
        real(self, handover, placement, replaces)

    patch.setattr(Worker, "stage", stage)


def _staged_by_most(patch: pytest.MonkeyPatch) -> None:
    real = HandoverState.waiting_for.fget  # type: ignore[attr-defined]
    patch.setattr(HandoverState, "waiting_for", property(lambda self: tuple(real(self))[1:]))


def _refused_by_one(patch: pytest.MonkeyPatch) -> None:
    def reached(report: HandoverDescribed, handover: int) -> RankProgress:
        return RankProgress.OVER if report.state == "ready" else real(report, handover)

    real = rank_progress.reached
    patch.setattr(coordinator, "reached", reached)


@pytest.mark.parametrize(
    "broken", [_others_are_not_told, _numbers_are_forgotten, _staged_by_most, _refused_by_one]
)
def test_a_walk_notices_when_a_part_lacks_a_rule(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(Unsafe):
        walked(range(400), 1500)
