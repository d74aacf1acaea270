"""Load: reserved at once, counted once, never negative, never left behind."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.facts.engines import Capabilities
from router.config import RouterConfig
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS, Booking, Reservations
from router.fleet_state.view import FleetView
from router.prefix_index.approximate_index import ApproximateIndex
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.routing_request import RoutingRequest
from router.scheduling.scheduler import Scheduler
from tests.router.router_fixture import engine_joined


def loads(reservations: Reservations, row: int, now: float = 0.0) -> list[int]:
    return reservations.load(np.array([row]), now)[:, 0].tolist()


def test_a_booking_counts_at_once_and_ends_in_two_steps() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    booking = reservations.book("a", (100, 1, 8, 10), 0.0)
    assert loads(reservations, row) == [100, 1, 8, 10]
    reservations.first_token(booking)
    assert loads(reservations, row) == [0, 1, 8, 10]
    reservations.release(booking)
    reservations.release(booking)
    assert loads(reservations, row) == [0, 0, 0, 0]
    assert reservations.open_bookings == 0


def test_a_report_that_contains_a_booking_replaces_it() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    booking = reservations.book("a", (100, 1, 8, 10), 0.0)
    reservations.report("a", (60, 1, 8, 10), 0.2)
    assert loads(reservations, row, 0.2) == [60, 1, 8, 10]
    reservations.release(booking)
    assert loads(reservations, row, 0.2) == [0, 0, 0, 0]


def test_a_report_that_may_contain_a_booking_is_not_added_to_it() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    reservations.book("a", (100, 1, 8, 10), 0.0)
    reservations.report("a", (100, 1, 8, 10), 0.05)
    assert loads(reservations, row, 0.05) == [100, 1, 8, 10]
    reservations.book("a", (50, 1, 4, 10), 0.06)  # the report cannot contain this one
    assert loads(reservations, row, 0.06) == [150, 2, 12, 20]
    reservations.report("a", (150, 2, 12, 20), 0.2)
    assert loads(reservations, row, 0.2) == [150, 2, 12, 20]


@pytest.mark.parametrize(
    ("reported_at", "expected"), [(0.2, [60, 2, 12, 30]), (0.05, [100, 2, 12, 30]), (0.0, [160, 3, 20, 50])]
)
def test_a_booking_that_arrives_after_a_report_containing_it_is_not_counted_twice(
    reported_at: float, expected: list[int]
) -> None:
    """Another router's booking: contained in the report, perhaps contained, or made after it. 10 of the 20
    reported tokens belong to the other sequence.
    """
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    reservations.report("a", (60, 2, 12, 40), reported_at)
    late = reservations.book("a", (100, 1, 8, 10), 0.0)
    assert loads(reservations, row, 0.3) == expected
    reservations.release(late)
    assert loads(reservations, row, 0.3)[STEPS] == (40 if reported_at == 0.0 else 20)


def test_prompts_of_a_rank_that_does_not_count_their_tokens_count_until_their_first_token() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    first = reservations.book("a", (100, 1, 8, 10), 0.0)
    reservations.book("a", (70, 1, 8, 10), 0.0)
    reservations.report("a", (0, 2, 16, 20), 0.2, prefill_known=False)
    assert loads(reservations, row, 0.2)[PREFILL] == 170
    reservations.first_token(first)
    assert loads(reservations, row, 0.2)[PREFILL] == 70
    reservations.report("a", (300, 2, 16, 20), 0.3, prefill_known=False)  # others wait there, too
    assert loads(reservations, row, 0.3)[PREFILL] == 300
    reservations.report("a", (0, 2, 16, 20), 0.4)
    assert loads(reservations, row, 0.4)[PREFILL] == 0


def test_what_others_have_sent_there_counts_beside_our_own() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    reservations.report("a", (1000, 4, 90, 40), 0.0)
    booking = reservations.book("a", (100, 1, 8, 10), 0.01)
    assert loads(reservations, row, 0.01) == [1100, 5, 98, 50]
    reservations.release(booking)
    assert loads(reservations, row, 0.01) == [1000, 4, 90, 40]


def test_without_a_fresh_report_our_own_bookings_speak_alone() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    reservations.book("a", (100, 1, 8, 10), 0.0)
    reservations.report("a", (700, 9, 70, 90), 1.0)
    assert loads(reservations, row, 2.0) == [700, 9, 70, 90]
    assert loads(reservations, row, 6.5) == [100, 1, 8, 10]


def test_what_a_booking_has_left_is_known_better_than_a_report_guesses_it() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    nearly_done = reservations.book("a", (100, 1, 8, 1000), 0.0)
    reservations.emitted(nearly_done, 990)
    reservations.report(
        "a", (0, 3, 30, 192), 1.0
    )  # two more sequences, known only to the report: 64 steps each
    assert loads(reservations, row, 1.0)[STEPS] == 10 + 2 * 64
    reservations.emitted(nearly_done, 16)
    assert loads(reservations, row, 1.0)[STEPS] == 2 * 64
    late = reservations.book("a", (100, 1, 8, 50), 2.0)
    assert loads(reservations, row, 2.0)[STEPS] == 2 * 64 + 50
    # May contain the late one. The larger reading is that it does not hide another one.
    reservations.report("a", (0, 3, 30, 192), 2.05)
    assert loads(reservations, row, 2.05)[STEPS] == 64 + 50
    reservations.release(late)
    reservations.release(nearly_done)
    assert loads(reservations, row, 2.05)[STEPS] == 64
    assert loads(reservations, row, 9.0)[STEPS] == 0


def test_what_the_first_report_after_a_moment_changes_is_noted_and_no_later_one() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    rows = np.array([reservations.add_rank("a"), reservations.add_rank("b")])
    reservations.report("a", (100, 1, 8, 10), 0.0)
    assert reservations.load_error(rows).tolist() == [[0, 0]] * AMOUNTS
    reservations.watch()
    reservations.book("a", (50, 1, 4, 7), 0.1)
    # The belief was 150, 2, 12 and 17. Two of the three sequences are unknown, with 20 tokens left.
    reservations.report("a", (500, 3, 9, 30), 1.0)
    reservations.report("a", (0, 0, 0, 0), 2.0)
    assert reservations.load_error(rows).T.tolist() == [[350, 1, -3, 10], [0, 0, 0, 0]]
    reservations.watch()
    assert not reservations.load_error(rows).any()
    reservations.report("b", (9, 0, 0, 0), 2.0)
    reservations.remove_rank("b")
    assert reservations.add_rank("c") == rows[1]
    assert not reservations.load_error(rows).any()


def test_a_rank_that_left_takes_its_bookings_with_it() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    booking = reservations.book("a", (100, 1, 8, 10), 0.0)
    reservations.remove_rank("a")
    assert reservations.add_rank("b") == row
    reservations.release(booking)
    reservations.first_token(booking)
    assert loads(reservations, row) == [0, 0, 0, 0]
    assert not reservations.report("a", (1, 1, 1, 10), 0.0)
    assert reservations.open_bookings == 0


def test_an_external_booking_counts_beside_every_report_until_its_first_token() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    booking = reservations.book("a", (100, 1, 8, 10), 0.0, external=True)
    for at in (0.05, 0.2, 2.5):
        reservations.report("a", (60, 2, 12, 30), at)
        assert loads(reservations, row, at) == [160, 3, 20, 40]
    reservations.first_token(booking)
    assert loads(reservations, row, 2.5) == [
        60,
        2,
        12,
        40,
    ]  # this report may contain it: the larger of the two readings
    reservations.report("a", (0, 3, 20, 30), 2.6)
    assert loads(reservations, row, 2.6) == [0, 3, 20, 30]  # 10 left for it, and 20 for the two others
    reservations.release(booking)
    assert loads(reservations, row, 2.6) == [0, 3, 20, 20]


@pytest.mark.parametrize("computed", [True, False])
def test_the_end_of_an_external_booking_takes_nothing_from_what_was_reported(computed: bool) -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    booking = reservations.book("a", (100, 1, 8, 10), 0.0, external=True)
    reservations.report("a", (60, 2, 12, 30), 0.5)
    if computed:
        reservations.first_token(booking)
        reservations.report("a", (60, 2, 12, 0), 1.0)
    reservations.release(booking)
    assert loads(reservations, row, 1.0)[:STEPS] == [60, 2, 12]


def test_what_another_router_holds_counts_beside_a_report_made_before_it_was_known() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    row = reservations.add_rank("a")
    reservations.report("a", (60, 2, 12, 40), 0.2)
    reservations.book("a", (100, 1, 8, 10), 0.0, external=True)
    assert loads(reservations, row, 0.3) == [160, 3, 20, 50]


@dataclass(eq=False)
class Model:
    """One rank's load by the rules of `router/fleet_state/reservations.py`, computed anew from all bookings
    each time.
    """

    bookings: list["ModelBooking"] = field(default_factory=list)
    reported: list[int] | None = None
    strangers_steps: int = 0

    def report(self, amounts: tuple[int, ...], now: float) -> None:
        self.reported = list(amounts)
        for one in self.bookings:
            if one.held or one.state == "contained":
                continue
            one.state = "perhaps" if now - one.booked_at < 0.1 else "contained"
        known = sum(not one.held for one in self.bookings)
        strangers = max(amounts[SEQUENCES] - known, 0)
        self.strangers_steps = strangers * amounts[STEPS] // max(amounts[SEQUENCES], 1)

    def less(self, one: "ModelBooking", at: int, amount: int) -> None:
        one.amounts[at] -= amount
        if self.reported is not None and at != STEPS and one.state == "contained" and not one.external:
            self.reported[at] = max(self.reported[at] - amount, 0)

    @property
    def load(self) -> list[int]:
        steps = self.strangers_steps + self.sum(STEPS, "perhaps", "contained", "beside")
        if self.reported is None:
            return [
                *(self.sum(at, "perhaps", "contained", "beside") for at in (PREFILL, SEQUENCES, BLOCKS)),
                steps,
            ]
        return [
            *(
                max(self.reported[at], self.sum(at, "perhaps")) + self.sum(at, "beside")
                for at in (PREFILL, SEQUENCES, BLOCKS)
            ),
            steps,
        ]

    def sum(self, at: int, *states: str) -> int:
        return sum(one.amounts[at] for one in self.bookings if one.state in states)


@dataclass(eq=False)
class ModelBooking:
    real: Booking
    amounts: list[int]
    booked_at: float
    external: bool
    held: bool
    state: str = "beside"
    """relation to the report: not contained, perhaps contained, or contained"""


class Bookkeeping(RuleBasedStateMachine):
    """Any order of bookings, first tokens, releases, reports, joins and leaves, compared with sums computed
    naively.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(settle_seconds=0.1, stale_seconds=1e9)
        self.rows: dict[str, int] = {}
        self.ranks: dict[str, Model] = {}
        self.now = 0.0

    @property
    def open(self) -> list[tuple[Model, ModelBooking]]:
        return [(rank, booking) for _, rank in sorted(self.ranks.items()) for booking in rank.bookings]

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def join(self, name: str) -> None:
        self.rows[name] = self.reservations.add_rank(name)
        self.ranks.setdefault(name, Model())

    @rule(name=st.sampled_from(["a", "b", "c"]), chance=st.integers(0, 3))
    def leave(self, name: str, chance: int) -> None:
        if chance == 0:
            self.reservations.remove_rank(name)
            self.rows.pop(name, None)
            self.ranks.pop(name, None)

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        amounts=st.tuples(st.integers(0, 500), st.just(1), st.integers(0, 50), st.integers(0, 90)),
        external=st.booleans(),
    )
    def book(self, data: st.DataObject, amounts: tuple[int, int, int, int], external: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        real = self.reservations.book(name, amounts, self.now, external=external)
        self.ranks[name].bookings.append(ModelBooking(real, list(amounts), self.now, external, held=external))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        rank, booking = data.draw(st.sampled_from(self.open))
        self.reservations.first_token(booking.real)
        rank.less(booking, PREFILL, booking.amounts[PREFILL])
        if booking.held:
            booking.held, booking.state = False, "perhaps"

    @precondition(lambda self: self.open)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def emit(self, data: st.DataObject, tokens: int) -> None:
        rank, booking = data.draw(st.sampled_from(self.open))
        self.reservations.emitted(booking.real, tokens)
        rank.less(booking, STEPS, min(tokens, booking.amounts[STEPS]))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rank, booking = data.draw(st.sampled_from(self.open))
        for _ in range(2):
            self.reservations.release(booking.real)
        for at in range(AMOUNTS):
            rank.less(booking, at, booking.amounts[at])
        rank.bookings.remove(booking)

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(),
        amounts=st.tuples(st.integers(0, 900), st.integers(0, 9), st.integers(0, 90), st.integers(0, 900)),
    )
    def report(self, data: st.DataObject, amounts: tuple[int, int, int, int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        self.reservations.report(name, amounts, self.now)
        self.ranks[name].report(amounts, self.now)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.3]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def equal_to_the_sums(self) -> None:
        assert self.reservations.open_bookings == len(self.open)
        for name, row in self.rows.items():
            rank, load = self.ranks[name], loads(self.reservations, row, self.now)
            assert load == rank.load
            held = [one for one in rank.bookings if one.held]
            assert all(one.real.held for one in held)
            assert min(total - sum(one.amounts[at] for one in held) for at, total in enumerate(load)) >= 0

    def teardown(self) -> None:
        for _, booking in self.open:
            self.reservations.release(booking.real)
        assert self.reservations.open_bookings == 0
        for row in self.rows.values():
            assert loads(self.reservations, row, 1e12) == [0] * AMOUNTS  # every report is stale


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8]))
def test_a_burst_of_a_thousand_spreads_evenly_over_equal_ranks(seed: int, ranks: int) -> None:
    scheduler, need = burst(ranks)
    counts = dict.fromkeys(range(ranks), 0)
    for number in range(1000):
        decision = scheduler.decide(need, f"d{number}", seed + 7919 * number, 0.0)
        scheduler.book(decision, need.prompt, 0.0)
        counts[decision.target.rank] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


def burst(ranks: int, **settings: Any) -> tuple[Scheduler, RoutingRequest]:
    """A scheduler over one engine whose ranks report KV events, so that nothing is estimated from routed
    prompts.
    """
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    urls = [f"http://h:{number}" for number in range(ranks)]
    view.join(
        engine_joined(
            "e", urls, "f" * 64, worker_id=1, shape=None, placement=None, capabilities=Capabilities()
        ),
        0.0,
    )
    view.sign_of_life(1, 0.0)
    config = RouterConfig(**{"max_requests_per_rank": 10_000, "max_queue_seconds": 1e9} | settings)
    holders = BlockIndex()
    scheduler = Scheduler(view, reservations, KvEventIndex(holders), ApproximateIndex(100, holders), config)
    return scheduler, RoutingRequest("demo", TokenPrompt(list(range(50))), 60, 10, "f" * 64)


def test_only_the_last_decisions_are_kept() -> None:
    scheduler, need = burst(2, kept_decisions=3)
    for number in range(5):
        scheduler.book(scheduler.decide(need, f"d{number}", 0, 0.0), need.prompt, 0.0)
    assert [scheduler.kept.get(f"d{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_explaining_books_and_keeps_nothing() -> None:
    scheduler, need = burst(2)
    decision = scheduler.decide(need, "d", 0, 0.0)
    assert scheduler.kept.get("d") is None
    assert scheduler.reservations.open_bookings == 0
    assert decision.record().chosen == decision.target.name


@pytest.mark.parametrize(
    "setting", ["max_attempts", "kept_decisions", "connect_seconds", "prefix_blocks_per_rank"]
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        RouterConfig(**{setting: 0})


def test_more_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="experts_weight"):
        RouterConfig(experts_weight=-1.0)
    with pytest.raises(ValueError, match="port"):
        RouterConfig(port=70_000)
    with pytest.raises(ValueError, match="ftp://"):
        RouterConfig(backends=("ftp://x",))
