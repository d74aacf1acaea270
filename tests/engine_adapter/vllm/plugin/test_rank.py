"""Expert ranks together: what they carry out, count and check, with an EPLB of arrays in place of vLLM's."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from roost_vllm.digests import ExpertHasher
from roost_vllm.identity import Identity
from roost_vllm.rank import ExpertRank
from roost_vllm.settings import Settings
from roost_vllm.slot_digests import SlotDigests
from roost_vllm.wire import (
    AgentWelcome,
    DescribeWorker,
    DropMap,
    ExpertDigests,
    FromWorker,
    LinkError,
    MapMoved,
    MapStatus,
    PermitVote,
    SlotMismatch,
    StageMap,
    WorkerDemand,
    map_digest,
)

CPU = torch.device("cpu")
LAYERS, EXPERTS, RANKS, SLOTS = 2, 4, 2, 3
INITIAL = np.array([[0, 1, 2, 3, 0, 1]] * LAYERS, np.int16)
OTHER = np.array([[3, 2, 1, 0, 2, 2]] * LAYERS, np.int16)
WEIGHTS = torch.randn(LAYERS, EXPERTS, 10)
Action = Callable[["Rank"], object]


def identity(rank: int) -> Identity:
    return Identity(
        missing=(), engine="0.32.0", instance="one", rank=rank, ranks=RANKS, target=0, targets=1, model="m",
        layers=LAYERS, experts=EXPERTS, slots=SLOTS, top_k=1, expert_bytes=40, all2all="naive",
        dtype="float32", quantisation="", asynchronous=False, sees_all=True, tells_demand=rank == 0,
    )  # fmt: skip


@dataclass
class Eplb:
    """EPLB of one rank: its slots, and the map in force."""

    rank: int
    table: np.ndarray = field(default_factory=INITIAL.copy)
    forgets: int | None = None
    """slot that a rearrangement does not fill"""
    ask: Callable[[], torch.Tensor | None] = lambda: None
    steps: list[int] = field(default_factory=list)
    step: int = 0
    is_layered: bool = False
    """layers come into force one at a step, as under asynchronous EPLB"""
    waiting: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = [[self.own(self.table)[layer]] for layer in range(LAYERS)]

    def own(self, table: np.ndarray) -> list[torch.Tensor]:
        first = self.rank * SLOTS
        return [
            WEIGHTS[layer][table[layer, first : first + SLOTS].astype(np.int64)] for layer in range(LAYERS)
        ]

    def read_map(self) -> np.ndarray:
        return self.table.copy()

    def load(self) -> torch.Tensor:
        return torch.ones(LAYERS, RANKS * SLOTS, dtype=torch.int32)

    def rearrange(self) -> None:
        agreed = self.ask()
        assert agreed is not None
        self.steps.append(self.step)
        self.begin(agreed.numpy().astype(np.int16))

    def begin(self, table: np.ndarray) -> None:
        self.waiting = list(enumerate(table))
        while self.waiting and not self.is_layered:
            self.commit_layer()

    def commit_layer(self) -> None:
        layer, row = self.waiting.pop(0)
        self.table[layer] = row
        kept = [slot for slot in range(SLOTS) if slot != self.forgets]
        self.weights[layer][0][kept] = self.own(self.table)[layer][kept]

    def is_moving(self) -> bool:
        return bool(self.waiting)


class Rank:
    """One rank with what it told its agent. refusal: why it takes no maps."""

    def __init__(
        self,
        number: int,
        exchange: Callable[[Sequence[int]], list[list[int]]],
        settings: Settings,
        refusal: str,
    ):
        self.eplb = Eplb(number)
        own = [[int(hasher.digest([tensor])) for tensor in layer[0]] for layer in self.eplb.weights]
        digests = np.array(exchange(np.array(own).ravel().tolist())).reshape(RANKS, LAYERS, SLOTS)
        table = np.concatenate(digests, axis=1)
        checked = SlotDigests(identity(number), INITIAL, table, hasher, self.eplb.weights, CPU)
        self.rank = ExpertRank(identity(number), self.eplb, exchange, checked, CPU, settings, refusal)
        self.eplb.ask = self.rank.take_agreed
        self.told: list[FromWorker] = []
        self.rank.link.send = self.told.append  # type: ignore[method-assign]
        welcome = AgentWelcome(proof=b"", epoch=1, report_seconds=0.05, vote_steps=4)
        self.rank.welcomed(welcome)

    def step(self, number: int) -> None:
        self.eplb.step = number
        self.rank.begin_step()
        self.rank.end_step(is_dummy=False)
        if self.eplb.waiting:
            self.eplb.commit_layer()
        self.rank.after_step()

    @property
    def status(self) -> MapStatus:
        self.rank.receive(DescribeWorker())
        return self.heard(MapStatus)[-1]

    def heard(self, kind: type) -> list:
        return [message for message in self.told if isinstance(message, kind)]


hasher = ExpertHasher(CPU)


class Ranks:
    """Ranks that step together, each in a thread."""

    def __init__(self, settings: Settings, refusal: str = "") -> None:
        self._barrier = threading.Barrier(RANKS, timeout=20)
        self._rows: list[list[int]] = [[] for _ in range(RANKS)]
        self.ranks: list[Rank] = [None] * RANKS  # type: ignore[list-item]
        self.exchanges = 0
        self._together(lambda number: self._make(number, settings, refusal))

    def _make(self, number: int, settings: Settings, refusal: str) -> None:
        self.ranks[number] = Rank(number, lambda row: self._exchange(number, row), settings, refusal)

    def _exchange(self, number: int, row: Sequence[int]) -> list[list[int]]:
        self._rows[number] = list(row)
        self._barrier.wait()
        rows = [list(one) for one in self._rows]
        self._barrier.wait()
        self.exchanges += number == 0
        return rows

    def _together(self, work: Callable[[int], object]) -> None:
        failures: list[BaseException] = []

        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []

    def steps(self, count: int) -> None:
        self._together(lambda number: [self.ranks[number].step(step) for step in range(count)])

    def steps_until_checked(self, digest: str) -> None:
        """A slice of digests is bounded in time: on a busy machine it takes more steps."""
        for _ in range(200):
            if all(rank.heard(ExpertDigests)[-1].served == digest for rank in self.ranks):
                return
            self.steps(1)
        pytest.fail("digests are not checked")

    def to(self, numbers: Sequence[int], message: StageMap | PermitVote | DropMap) -> None:
        for number in numbers:
            self.ranks[number].rank.receive(message)


@pytest.fixture
def settings() -> Settings:
    return Settings("127.0.0.1", 1, b"secret")


@pytest.fixture
def ranks(settings: Settings) -> Ranks:
    return Ranks(settings)


def staging(handover: int = 1, table: np.ndarray = OTHER) -> StageMap:
    return StageMap(
        handover=handover,
        epoch=handover + 1,
        replaces=map_digest(INITIAL, EXPERTS),
        map=table.astype("<i2").tobytes(),
    )


def test_a_map_that_all_were_permitted_to_vote_for_comes_into_force_in_one_step(ranks: Ranks) -> None:
    ranks.to([0, 1], staging())
    ranks.steps(3)
    assert [rank.status.state for rank in ranks.ranks] == ["staged", "staged"]
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(3)
    assert [rank.eplb.steps for rank in ranks.ranks] == [[0], [0]]
    ranks.steps_until_checked(map_digest(OTHER, EXPERTS))
    for rank in ranks.ranks:
        assert (rank.status.flipped, rank.status.epoch) == (1, 2)
        assert rank.status.served == map_digest(OTHER, EXPERTS)
        (moved,) = rank.heard(MapMoved)
        assert (moved.handover, moved.received) == (1, 2)
        assert rank.heard(SlotMismatch) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_no_rank_moves_while_one_lacks_the_map_or_the_permission(ranks: Ranks, lost: int) -> None:
    ranks.to([1 - lost], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(5)
    ranks.to([lost], staging())
    ranks.steps(5)
    assert [rank.eplb.steps for rank in ranks.ranks] == [[], []]
    ranks.to([lost], PermitVote(handover=1))
    ranks.steps(5)
    assert [len(rank.eplb.steps) for rank in ranks.ranks] == [1, 1]


def test_a_map_that_one_rank_dropped_is_never_carried_out(ranks: Ranks) -> None:
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.to([1], DropMap(handover=1, reason="no"))
    ranks.steps(5)
    assert [rank.eplb.steps for rank in ranks.ranks] == [[], []]
    assert [rank.status.state for rank in ranks.ranks] == ["voting", "refused"]


def test_after_the_first_steps_votes_are_as_rare_as_the_agent_wishes(ranks: Ranks) -> None:
    ranks.steps(64)
    before = ranks.exchanges
    ranks.steps(40)
    assert ranks.exchanges - before == 10


def test_a_slot_that_does_not_hold_its_expert_is_told_and_ends_all_maps(ranks: Ranks) -> None:
    ranks.ranks[1].eplb.forgets = 2
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(1)
    ranks.steps_until_checked(map_digest(OTHER, EXPERTS))
    mismatches = ranks.ranks[1].heard(SlotMismatch)
    assert [(one.layer, one.slot, one.expert) for one in mismatches] == [(0, 5, 2), (1, 5, 2)]
    assert ranks.ranks[0].heard(SlotMismatch) == []
    ranks.to([1], staging(2))
    assert "does not hold expert 2" in ranks.ranks[1].heard(MapStatus)[-1].reason


def test_counters_are_told_with_the_map_that_they_were_counted_under(ranks: Ranks) -> None:
    ranks.steps(4)
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(6)
    time.sleep(0.06)
    ranks.steps(1)
    told = ranks.ranks[0].heard(WorkerDemand)
    served = {map_digest(table, EXPERTS): table for table in (INITIAL, OTHER)}
    steps = dict.fromkeys(served, 0)
    for message in told:
        copies = np.bincount(served[message.served][0], minlength=EXPERTS)
        demand = np.frombuffer(message.demand, "<i8").reshape(LAYERS, EXPERTS)
        assert demand.tolist() == [(copies * message.steps).tolist()] * LAYERS
        steps[message.served] += message.steps
    assert list(steps.values()) == [5, 6], "the step before the move was counted under the old map"
    assert all(message.demand == b"" for message in ranks.ranks[1].heard(WorkerDemand))


def test_a_step_with_requests_of_the_agent_only_is_not_counted(ranks: Ranks) -> None:
    nudge = SimpleNamespace(
        finished_req_ids=set(), scheduled_new_reqs=[], num_scheduled_tokens={"cmpl-roost-nudge-1-0-00": 1}
    )
    for rank in ranks.ranks:
        rank.rank.schedule(None, nudge)
    ranks.steps(1)
    idle = SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[], num_scheduled_tokens={})
    for rank in ranks.ranks:
        rank.rank.schedule(None, idle)
    assert ranks.ranks[0].heard(WorkerDemand) == []


def test_vllms_own_policy_takes_over_only_when_all_ranks_are_without_an_agent() -> None:
    alone = Settings("127.0.0.1", 1, b"secret", fallback=True, patience=0.0)
    ranks = Ranks(alone)
    ranks.to([0, 1], staging())
    ranks.ranks[0].rank.link.alone_seconds = lambda: 0.0  # type: ignore[method-assign]
    ranks.steps(3)
    assert [rank.rank.is_fallback() for rank in ranks.ranks] == [False, False]
    assert ranks.ranks[1].status.state == "staged"
    del ranks.ranks[0].rank.link.alone_seconds
    ranks.steps(3)
    assert [rank.rank.is_fallback() for rank in ranks.ranks] == [True, True]
    assert [rank.status.state for rank in ranks.ranks] == ["idle", "idle"]


@pytest.mark.parametrize("is_layered", [False, True])
def test_a_vllm_that_takes_no_maps_keeps_its_own_policy_and_tells_what_that_does(
    settings: Settings, is_layered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(settings, "asynchronous EPLB")
    assert "no placements: asynchronous EPLB. vLLM's own policy stays in force" in caplog.text
    before = ranks.exchanges
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(3)
    for rank in ranks.ranks:
        assert rank.rank.is_fallback()
        assert rank.status.reason == "asynchronous EPLB"
        assert rank.eplb.steps == []
        rank.eplb.is_layered = is_layered
        rank.eplb.begin(OTHER)
        rank.rank.vllm_rearranged()
    assert ranks.ranks[0].heard(MapMoved) == []
    ranks.steps(LAYERS)
    assert ranks.exchanges == before, "nobody votes"
    for rank in ranks.ranks:
        (moved,) = rank.heard(MapMoved)
        assert (moved.handover, moved.map) == (0, OTHER.astype("<i2").tobytes())
        assert (rank.status.served, rank.status.flipped) == (map_digest(OTHER, EXPERTS), 0)


def test_the_map_stays_without_an_agent_unless_told_otherwise(ranks: Ranks) -> None:
    for rank in ranks.ranks:
        rank.rank.link.alone_seconds = lambda: 1e9  # type: ignore[method-assign]
    ranks.steps(3)
    assert [rank.rank.is_fallback() for rank in ranks.ranks] == [False, False]


def test_a_report_that_fails_ends_the_reports_and_not_the_worker(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.ranks[0].rank.schedule(None, None)  # no scheduler of any release hands that over
    assert [one.reason for one in ranks.ranks[0].heard(LinkError)] == [
        "reports of this worker end: AttributeError: 'NoneType' object has no attribute 'finished_req_ids'"
    ]
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(5)
    assert [len(rank.eplb.steps) for rank in ranks.ranks] == [1, 1], "maps are carried out all the same"
    assert ranks.ranks[0].heard(WorkerDemand) == []


def test_rows_of_an_unknown_form_end_the_reports_and_not_vllms_output(ranks: Ranks) -> None:
    ranks.ranks[0].rank.copied([0, 1], None)
    assert [one.reason for one in ranks.ranks[0].heard(LinkError)] == [
        "reports of this worker end: AttributeError: 'NoneType' object has no attribute 'query_start_loc'"
    ]


def test_a_rank_that_cannot_check_its_slots_takes_no_further_maps(ranks: Ranks) -> None:
    no_tensor: list = ranks.ranks[1].eplb.weights[0]
    no_tensor.append("no tensor")
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(5)
    assert [len(rank.eplb.steps) for rank in ranks.ranks] == [1, 1]
    (told,) = ranks.ranks[1].heard(LinkError)
    assert told.reason.startswith("digests cannot be computed: AttributeError: ")
    ranks.to([1], staging(2))
    assert ranks.ranks[1].heard(MapStatus)[-1].reason == told.reason


def test_counters_that_cannot_be_told_do_not_keep_a_rank_from_the_common_move(ranks: Ranks) -> None:
    ranks.steps(1)
    ranks.ranks[0].rank.link.processor_seconds = None  # type: ignore[assignment]
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(2)
    assert [len(rank.eplb.steps) for rank in ranks.ranks] == [1, 1]
    assert len(ranks.ranks[0].heard(LinkError)) == 1


@pytest.mark.parametrize(
    "message", [staging(), AgentWelcome(proof=b"", epoch=1, report_seconds=1, vote_steps=4)]
)
def test_nothing_changes_between_an_answer_and_its_sending(
    ranks: Ranks, message: StageMap | AgentWelcome
) -> None:
    rank = ranks.ranks[0].rank
    waited = []

    def send(sent: FromWorker) -> None:
        other = threading.Thread(target=rank.hello, kwargs={"proof": b"", "nonce": b""})
        other.start()
        other.join(0.1)
        waited.append(other.is_alive())

    rank.link.send = send  # type: ignore[method-assign]
    if isinstance(message, AgentWelcome):
        rank.welcomed(message)
    else:
        rank.receive(message)
    assert waited
    assert all(waited), "the state is locked until its message is sent"


def test_a_map_that_comes_layer_by_layer_is_in_force_with_the_last_one(ranks: Ranks) -> None:
    for rank in ranks.ranks:
        rank.eplb.is_layered = True
    ranks.to([0, 1], staging())
    ranks.to([0, 1], PermitVote(handover=1))
    ranks.steps(2)
    ranks.to([0, 1], DropMap(handover=1, reason="too late"))
    for rank in ranks.ranks:
        assert (rank.status.state, rank.status.layers_done, rank.status.flipped) == ("voting", 1, 0)
        assert rank.status.served == map_digest(INITIAL, EXPERTS)
        assert rank.heard(MapMoved) == []
    ranks.steps(1)
    for rank in ranks.ranks:
        assert (rank.status.state, rank.status.layers_done, rank.status.flipped) == ("idle", LAYERS, 1)
        assert rank.status.served == map_digest(OTHER, EXPERTS)
    ranks.steps_until_checked(map_digest(OTHER, EXPERTS))
    assert all(rank.heard(SlotMismatch) == [] for rank in ranks.ranks)
