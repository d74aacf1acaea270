"""The real coordinator, the real agent and the plugin's own handover state of vLLM's workers against each
other, under all faults of networks and processes.
"""

import numpy as np
import pytest
from roost_vllm import ballots
from roost_vllm.ballots import ballot_digest, tally
from roost_vllm.mailbox import Mailbox
from roost_vllm.wire import DropMap, MapStatus, PermitVote, StageMap

from engine_adapter.engine import WorkerMap
from fleet.placement import Placement
from tests.handovers.handover_fake_memory import Unsafe
from tests.handovers.test_vote_parties import walked
from tests.handovers.vote_parties import VoteWorld
from tests.voting_workers import Worker, digest


class PluginWorker(Worker):
    """One worker process, with the plugin's mailbox."""

    def __init__(self, placement: Placement) -> None:
        self.mailbox = Mailbox(placement.expert_of_slot.copy(), placement.experts)
        self.mailbox.epoch = placement.epoch
        super().__init__(placement)

    def stage(self, handover: int, placement: Placement, replaces: str) -> None:
        content = placement.expert_of_slot.astype("<i2").tobytes()
        message = StageMap(handover=handover, epoch=placement.epoch, replaces=replaces, map=content)
        self._said(self.mailbox.stage(message))

    def permit(self, handover: int) -> None:
        self._said(self.mailbox.permit(PermitVote(handover=handover)))

    def drop(self, handover: int, reason: str) -> None:
        self._said(self.mailbox.drop(DropMap(handover=handover, reason=reason)))

    def carry_out(self) -> None:
        table = self.mailbox.pass_vote().table
        self.mailbox.come_into_force(np.array(table))
        self.map = Placement(
            table, experts=self.map.experts, ranks=self.map.ranks, epoch=self.mailbox.epoch, duplicates=True
        )
        assert digest(self.map) == self.mailbox.served
        self._said(self.mailbox.status())

    def _said(self, status: MapStatus) -> None:
        """Note what the walk looks at."""
        held = self.mailbox.held
        self.held = None if held is None else _placement(held.table, self.map, held.epoch)
        self.handover, self.flipped = status.handover, status.flipped
        self.voting = status.state == "voting"

    @property
    def status(self) -> WorkerMap:
        said = self.mailbox.status()
        return WorkerMap(
            said.state,
            said.handover,
            said.digest,
            said.served,
            said.flipped,
            said.epoch,
            said.reason,
            said.layers_done,
        )

    @property
    def vote(self) -> ballots.Ballot:
        proposal = self.mailbox.proposal()
        return ballots.Ballot(
            count=1,
            proposal=ballot_digest(proposal.digest) if proposal else 0,
            served=ballot_digest(self.mailbox.served),
            handover=proposal.handover if proposal else 0,
            every=32,
            fallback=0,
        )


def _placement(table: np.ndarray, like: Placement, epoch: int) -> Placement:
    return Placement(table, experts=like.experts, ranks=like.ranks, epoch=epoch)


class PluginWorld(VoteWorld):
    """Workers with the plugin's mailbox, and its count of the ballots."""

    def worker(self, placement: Placement) -> Worker:
        return PluginWorker(placement)

    def passes(self) -> bool:
        votes = [worker.vote for worker in self.workers if isinstance(worker, PluginWorker)]
        return tally(votes, every=32, fallback=False).passed


def test_whatever_happens_on_the_way_the_parties_keep_every_promise_and_come_to_rest() -> None:
    flips, refusals = walked(range(40), 1500, PluginWorld)
    assert flips > 60, "hardly any handover came to its end"
    assert refusals > 3, "hardly any decided handover was refused"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_on_many_long_walks() -> None:
    flips, refusals = walked(range(5000, 5150), 4000, PluginWorld)
    assert flips > 400
    assert refusals > 100


class _CountsMost(PluginWorld):
    """Ballots of two workers suffice."""

    def passes(self) -> bool:
        votes = [worker.vote for worker in self.workers if isinstance(worker, PluginWorker)]
        return any(tally(pair, every=32, fallback=False).passed for pair in (votes[:2], votes[1:]))


def test_a_walk_notices_when_ballots_of_some_suffice() -> None:
    with pytest.raises((Unsafe, RuntimeError), match=r"different maps|that this worker did not vote for"):
        walked(range(100), 1500, _CountsMost)
