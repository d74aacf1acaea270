"""Exhaustive check of handovers in an engine that moves its experts itself: every order of all events, within
bounds. And of what each rule is for.
"""

from collections.abc import Iterator

import pytest

from fleet.handover import CoordinatorEvent, ProtocolState, aborted
from tests.handovers.exploration import Broken, Step, explore
from tests.handovers.handover_world import STAGED, Faults, State, World, fact_of
from tests.handovers.vote_model import (
    DROP,
    HOLDS,
    NONE,
    PERMIT,
    STAGE,
    VOTES,
    Engine,
    Votes,
    VoteSize,
    Worker,
)

MOST = 1_500_000
SMALL = VoteSize(2, 1, Faults())
LATE = "something is left open, and nothing that is due will ever end it"
BOTH = "a handover is both committed and aborted"
APART = "ranks serve different maps in one step"


@pytest.mark.parametrize(
    ("size", "least"),
    [
        (VoteSize(3, 1, Faults()), 5_000),
        (VoteSize(2, 2, Faults()), 4_000),
        (VoteSize(2, 1, Faults(agents=1)), 9_000),
        (VoteSize(2, 1, Faults(leaders=1, drops=1)), 5_000),
        (VoteSize(2, 1, Faults(leaders=1, deaths=1)), 5_000),
        (VoteSize(2, 1, Faults(drops=1, votes=1)), 1_000),
        (VoteSize(2, 2, Faults(deaths=1)), 20_000),
    ],
    ids=[
        "3 ranks",
        "2 handovers",
        "the agent dies",
        "two coordinators, and a worker drops its map",
        "two coordinators, and the engine dies",
        "a vote in pieces, and a worker drops its map",
        "2 handovers, and the engine dies",
    ],
)
def test_every_promise_holds_in_every_state_and_every_run_ends(size: VoteSize, least: int) -> None:
    assert explore(Votes(size), most=MOST).states > least, "the model does less than it should"


class _Impatient(Votes):
    """Coordinators that abort do not wait for silent ranks, but repeat the abort to ranks found with an ended
    handover.
    """

    silence_ends_aborts = clears_strays = True


@pytest.mark.parametrize(
    "size",
    [
        VoteSize(2, 1, Faults(leaders=1)),
        pytest.param(VoteSize(2, 1, Faults(agents=1)), marks=pytest.mark.slow),
        pytest.param(VoteSize(2, 2, Faults()), marks=pytest.mark.slow),
        pytest.param(VoteSize(2, 1, Faults(drops=1, deaths=1)), marks=pytest.mark.slow),
    ],
    ids=["two coordinators", "the agent dies", "2 handovers", "a drop and a death"],
)
def test_an_abort_need_not_wait_for_ranks_that_are_silent_if_they_are_told_later(size: VoteSize) -> None:
    explore(_Impatient(size), most=MOST)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "size",
    [
        VoteSize(2, 2, Faults(agents=1)),
        VoteSize(2, 1, Faults(agents=1, drops=1, votes=1)),
        VoteSize(2, 1, Faults(agents=1, deaths=1)),
        VoteSize(2, 1, Faults(leaders=1, agents=1)),
        VoteSize(3, 1, Faults(drops=1, votes=1)),
        VoteSize(3, 1, Faults(leaders=1, deaths=1)),
        VoteSize(2, 2, Faults(drops=2, votes=1)),
        VoteSize(2, 2, Faults(deaths=2)),
        VoteSize(2, 3, Faults()),
    ],
    ids=[
        "2 handovers, the agent dies",
        "the agent dies, a vote in pieces, a worker drops its map",
        "agent and engine die",
        "agent and coordinator die",
        "3 ranks, a vote in pieces, a worker drops its map",
        "3 ranks, two coordinators, the engine dies",
        "2 handovers, maps are dropped, a vote in pieces",
        "two deaths",
        "3 handovers",
    ],
)
def test_with_several_faults_together_every_promise_holds_and_every_run_ends(size: VoteSize) -> None:
    assert explore(Votes(size), most=MOST).states > 10_000


class _Watched(Votes):
    """Notes which ends were reached."""

    def __init__(self, size: VoteSize) -> None:
        super().__init__(size)
        self.ends: set[str] = set()

    def steps(self, state: State) -> Iterator[Step[State]]:
        for step in super().steps(state):
            self.ends |= {event.value for event in CoordinatorEvent if event.value in step.told[1]}
            yield step


def test_the_model_reaches_every_end_of_a_handover() -> None:
    model = _Watched(VoteSize(2, 1, Faults(deaths=1, drops=1)))
    explore(model, most=MOST)
    assert model.ends == {event.value for event in CoordinatorEvent} - {CoordinatorEvent.BEGIN.value}


class _ActsOnThePermission(Votes):
    """A worker that is permitted carries out its map, without a vote."""

    def moves_alone(self, worker: Worker) -> bool:
        return worker.hold == VOTES


class _DropsAfterItsBallot(Votes):
    """A worker handles messages between its ballot and the result."""

    def hears(self, worker: Worker) -> bool:
        return True


class _VotesForWhatItHolds(Votes):
    """A worker votes without a permission."""

    def ballot(self, worker: Worker) -> int:
        return worker.handover if worker.hold else 0


class _ForgetsWhatItDropped(Votes):
    """A worker takes a map whose number it has dropped before."""

    ignores_past = False

    def takes(self, worker: Worker, message: int, handover: int) -> Worker:
        if message == STAGE and worker.hold == NONE and handover >= worker.handover > worker.made:
            return worker._replace(hold=HOLDS, handover=handover)
        return super().takes(worker, message, handover)


class _TakesAnyPermission(Votes):
    """A permission names no handover."""

    ignores_past = False

    def takes(self, worker: Worker, message: int, handover: int) -> Worker:
        if message == PERMIT and worker.hold == HOLDS:
            return worker._replace(hold=VOTES)
        return super().takes(worker, message, handover)


class _IgnoresUnknownDrops(Votes):
    """A worker that is asked to drop a map that never arrived does not note that its number is past."""

    def takes(self, worker: Worker, message: int, handover: int) -> Worker:
        if message == DROP and handover > worker.handover:
            return worker
        return super().takes(worker, message, handover)


class _LeavesTheOthersVoting(Votes):
    """The agent does not tell the others when one worker has dropped the map."""

    hears_refusals = False


class _TakesOneForAll(Votes):
    """A decided handover is aborted although not every rank has said that it dropped the map."""

    def refused_by_all(self, said: int, handover: int) -> bool:
        return bool(said & fact_of(STAGED, handover))


class _ConcludesAlone(Votes):
    """The agent says that a handover has ended as soon as it has passed on the abort."""

    def concludes(self, state: ProtocolState, token: int, handover: int) -> ProtocolState:
        return aborted(state, token, handover)


class _DecidesBlindly(Votes):
    """The decision is written without compare-and-set."""

    decides_blindly = True


class _KeepsItsEpoch(Votes):
    """A restarted engine joins with the last recorded epoch, as one does that resumes its placement."""

    def base(self, world: World, engine: Engine) -> int:
        return max(engine.bases[-1], world.handovers[world.placed - 1][1] if world.placed else 0)


class _ReadsOnlyTheLog(Votes):
    """A restarted engine joins under an epoch above the recorded ones, and does not look at the key."""

    def base(self, world: World, engine: Engine) -> int:
        return _KeepsItsEpoch.base(self, world, engine) + 1  # type: ignore[arg-type]


class _TakesSilenceForDeath(Votes):
    """A handover is closed because the engine is silent."""

    def gone(self, world: World, handover: int) -> bool:
        return True


@pytest.mark.parametrize(
    ("broken", "size", "promise", "ending"),
    [
        (_ActsOnThePermission, SMALL, APART, "carries out its map"),
        (
            _DropsAfterItsBallot,
            SMALL._replace(faults=Faults(drops=1, votes=1)),
            APART,
            "learns that the vote has passed",
        ),
        (
            _VotesForWhatItHolds,
            SMALL,
            "a map is in force that was never decided",
            "all workers vote for handover 1",
        ),
        (_ForgetsWhatItDropped, SMALL, LATE, ""),
        (
            _TakesAnyPermission,
            SMALL._replace(handovers=2, faults=Faults(drops=1)),
            "a map is in force that was never decided",
            "all workers vote for handover 2",
        ),
        (_IgnoresUnknownDrops, SMALL, LATE, ""),
        (_LeavesTheOthersVoting, SMALL._replace(faults=Faults(drops=1)), LATE, ""),
        (_TakesOneForAll, SMALL, BOTH, ""),
        (_ConcludesAlone, SMALL._replace(faults=Faults(agents=1)), LATE, ""),
        (_DecidesBlindly, SMALL, BOTH, "all workers vote"),
        (
            _KeepsItsEpoch,
            SMALL._replace(faults=Faults(deaths=1)),
            "an epoch stands for two maps, or went back",
            "records the placement of handover 1",
        ),
        (
            _ReadsOnlyTheLog,
            SMALL._replace(faults=Faults(deaths=1)),
            "an epoch stands for two maps, or went back",
            "records the placement of handover 1",
        ),
        (_TakesSilenceForDeath, SMALL, LATE, ""),
    ],
)
def test_a_protocol_that_lacks_a_rule_is_caught_and_how_it_fails_is_told(
    broken: type[Votes], size: VoteSize, promise: str, ending: str
) -> None:
    with pytest.raises(Broken) as found:
        explore(broken(size), most=MOST)
    assert found.value.promise == promise, found.value
    assert ending in found.value.story[-1], found.value
