"""Replication of bookings between routers: never negative, nothing left behind, and in the end equal
everywhere.
"""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.facts.bookings import BookedLoad, ReservationsChanged
from fleet.membership import SILENT_SECONDS
from fleet.requests.routing import ReservationsDescribed
from router.fleet_state.booking_replication import (
    MAX_PER_MESSAGE,
    MAX_PREFIX_BLOCKS,
    BookingMessage,
    OwnBookings,
    RemoteBookings,
)
from router.fleet_state.reservations import PREFILL, SEQUENCES, STEPS, Booking, Reservations

RANK = (7, 0)
RANKS = [(7, 0), (7, 1), (8, 0)]


@dataclass
class Peer:
    """One router without its I/O."""

    name: int
    reservations: Reservations = field(
        default_factory=lambda: Reservations(settle_seconds=0.1, stale_seconds=5.0)
    )
    sent: int = 0

    def __post_init__(self) -> None:
        self.rows = np.array([self.reservations.add_rank(key) for key in RANKS])
        self.learnt: list[tuple[tuple[int, int], BookingMessage]] = []
        self.ledger = RemoteBookings(
            self.reservations, 60.0, lambda rank, word: self.learnt.append((rank, word))
        )
        self.diary = OwnBookings(self.name, refresh_seconds=20.0)
        self.open: dict[str, Booking] = {}

    def book(
        self,
        decision_id: str,
        now: float,
        key: tuple[int, int] = RANK,
        amounts: tuple[int, int, int, int] = (100, 1, 8, 40),
        *,
        external: bool = False,
    ) -> Booking:
        booking = self.open[decision_id] = self.reservations.book(key, amounts, now, external=external)
        self.diary.booked(decision_id, key, booking)
        return booking

    def end(self, decision_id: str) -> None:
        booking = self.open.pop(decision_id)
        self.reservations.release(booking)
        self.diary.ended(booking)

    def first_token(self, decision_id: str) -> None:
        self.reservations.first_token(self.open[decision_id])
        self.diary.first_token(self.open[decision_id])

    def emitted(self, decision_id: str, tokens: int) -> None:
        self.reservations.emitted(self.open[decision_id], tokens)
        self.diary.emitted(self.open[decision_id])

    def next_message(self, now: float) -> tuple[int, ReservationsChanged]:
        """Return the next message: news, or a sign of life."""
        message = self.diary.take(now) or ReservationsChanged(router=self.name)
        self.sent += 1
        return self.sent - 1, message

    def described(self, now: float) -> ReservationsDescribed:
        return ReservationsDescribed(
            router=self.name, publisher_id=self.name, sequence=self.sent - 1, booked=self.diary.all(now)
        )

    def load(self, now: float) -> list[list[int]]:
        return self.reservations.load(self.rows, now).tolist()  # type: ignore[no-any-return]


def deliver(sender: Peer, receiver: Peer, now: float) -> bool:
    """Deliver the next message. Return True if the list must be requested."""
    sequence, message = sender.next_message(now)
    return receiver.ledger.receive(sender.name, sequence, message, now).incomplete


@pytest.fixture
def pair() -> tuple[Peer, Peer]:
    return Peer(1), Peer(2)


def test_a_booking_counts_at_the_other_router_through_its_whole_life(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    assert not deliver(one, other, 0.005)
    assert [row[0] for row in other.load(0.01)] == [100, 1, 8, 40]
    one.first_token("a")
    one.emitted("a", 20)
    deliver(one, other, 0.02)
    assert [row[0] for row in other.load(0.02)] == [0, 1, 8, 20]
    one.end("a")
    deliver(one, other, 0.03)
    assert [row[0] for row in other.load(0.03)] == [0, 0, 0, 0]
    assert other.ledger.open == 0


def test_what_is_held_for_another_data_plane_counts_beside_reports_at_the_other_router_too(
    pair: tuple[Peer, Peer],
) -> None:
    one, other = pair
    one.book("a", 0.0, external=True)
    deliver(one, other, 0.005)
    for peer in pair:
        peer.reservations.report(RANK, (50, 2, 10, 30), 1.0)
    assert [row[0] for row in one.load(1.0)] == [row[0] for row in other.load(1.0)] == [150, 3, 18, 70]
    one.first_token("a")
    deliver(one, other, 1.1)
    for peer in pair:
        peer.reservations.report(RANK, (50, 3, 10, 30), 1.2)
    assert [row[0] for row in one.load(1.2)] == [row[0] for row in other.load(1.2)] == [50, 3, 10, 60]
    one.end("a")
    deliver(one, other, 1.3)
    assert [row[0] for row in one.load(1.3)] == [row[0] for row in other.load(1.3)] == [50, 3, 10, 20]


def test_a_newcomer_hears_of_a_held_booking_after_its_first_token_and_takes_nothing_from_reports(
    pair: tuple[Peer, Peer],
) -> None:
    one, other = pair
    one.book("a", 0.0, external=True)
    other.reservations.report(RANK, (50, 2, 10, 30), 1.0)
    one.first_token("a")
    deliver(one, other, 1.1)
    assert [row[0] for row in other.load(1.1)][:STEPS] == [50, 2, 10]
    one.end("a")
    deliver(one, other, 1.2)
    assert [row[0] for row in other.load(1.2)] == [50, 2, 10, 30]


def test_a_held_booking_of_a_prompt_that_is_all_cached_stays_held(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0, amounts=(0, 1, 8, 40), external=True)
    for at in (0.01, 0.02):
        one.diary.republish_all()
        deliver(one, other, at)
    other.reservations.report(RANK, (50, 2, 10, 30), 1.0)
    assert [row[0] for row in other.load(1.0)] == [50, 3, 18, 70]


def test_a_booking_from_a_router_without_external_ones_is_an_ordinary_one() -> None:
    decoded = msgspec.json.decode(
        b'{"id": "a", "worker_id": 7, "rank": 0, "prefill_tokens": 1, "blocks": 1, "steps": 1, "age_seconds":'
        b" 0.0}",
        type=BookedLoad,
    )
    assert (decoded.external, decoded.held) == (False, False)


def test_little_progress_is_not_published_and_much_is(pair: tuple[Peer, Peer]) -> None:
    one, _ = pair
    one.book("a", 0.0, amounts=(1, 1, 1, 400))
    assert one.diary.take(0.0) is not None
    one.emitted("a", 99)
    assert one.diary.take(0.0) is None
    one.emitted("a", 1)
    message = one.diary.take(0.0)
    assert message is not None
    assert message.booked[0].steps == 300


def test_a_booking_that_ends_unpublished_is_never_published(pair: tuple[Peer, Peer]) -> None:
    one, _ = pair
    one.book("a", 0.0)
    one.end("a")
    assert not one.diary.has_changes
    assert one.diary.take(0.0) is None


def test_a_booking_is_not_counted_beside_the_report_that_contains_it(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    other.reservations.report(RANK, (100, 1, 8, 40), 0.15)
    deliver(one, other, 0.2)
    assert [row[0] for row in other.load(0.2)] == [100, 1, 8, 40]


def test_a_gap_asks_for_the_list_and_the_list_mends_it(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("stays", 0.0)
    one.book("goes", 0.0)
    deliver(one, other, 0.0)
    one.end("goes")
    one.book("missed", 0.0)
    one.next_message(0.0)  # lost
    assert deliver(one, other, 0.5)
    assert other.ledger.incomplete(1)
    assert other.ledger.replace(one.described(0.6), 0.6)
    assert not other.ledger.incomplete(1)
    assert other.load(0.6) == one.load(0.6)


def test_what_ended_while_the_list_was_under_way_does_not_come_back(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    one.next_message(0.0)  # lost
    assert deliver(one, other, 0.5)
    late = one.described(0.5)
    one.end("a")
    one.book("b", 0.6)
    deliver(one, other, 0.6)
    assert other.ledger.replace(late, 0.7)
    assert other.load(0.7) == one.load(0.7)


def test_a_list_older_than_what_was_missed_does_not_do(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    deliver(one, other, 0.0)
    early = one.described(0.0)
    one.book("a", 0.0)
    one.next_message(0.0)  # lost
    assert deliver(one, other, 0.5)
    assert not other.ledger.replace(early, 0.6)
    assert other.ledger.replace(one.described(0.7), 0.7)


def test_a_router_that_falls_silent_is_queried_and_then_its_bookings_end(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    deliver(one, other, 0.0)
    assert other.ledger.sweep(0.9) == []
    assert other.ledger.sweep(1.1) == [1]
    assert other.ledger.sweep(1.3) == []
    other.ledger.sweep(SILENT_SECONDS + 0.1)
    assert other.ledger.routers == ()
    assert other.reservations.open_bookings == 0


def test_a_booking_that_is_not_named_again_expires_and_one_that_is_continues(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    deliver(one, other, 0.0)
    for second in range(1, 200):
        deliver(one, other, float(second))
        other.ledger.sweep(float(second))
    assert other.ledger.open == 1
    for second in range(200, 270):
        other.ledger.receive(1, one.sent, ReservationsChanged(router=1), float(second))
        one.sent += 1
        other.ledger.sweep(float(second))
    assert (other.ledger.open, other.ledger.expired) == (0, 1)


@pytest.mark.parametrize(
    "load",
    [
        *({"prefill_tokens": -1}, {"blocks": 2**63}, {"steps": -5}, {"rank": 9}, {"worker_id": 99}),
        *(
            {"session": -1},
            {"session": 2**64},
            {"prefix": b"1234567"},
            {"prefix": bytes(8 * MAX_PREFIX_BLOCKS + 8)},
        ),
        *({"age_seconds": -1.0}, {"age_seconds": float("nan")}, {"id": "x" * 129}),
    ],
)
def test_a_booking_that_makes_no_sense_is_refused_and_counted(
    pair: tuple[Peer, Peer], load: dict[str, object]
) -> None:
    _, other = pair
    good: dict[str, object] = {
        "id": "a",
        "worker_id": 7,
        "rank": 0,
        "prefill_tokens": 1,
        "blocks": 1,
        "steps": 1,
        "age_seconds": 0.0,
    }
    other.ledger.receive(1, 0, ReservationsChanged(router=1, booked=(BookedLoad(**{**good, **load}),)), 0.0)  # type: ignore[arg-type]
    assert (other.ledger.open, other.ledger.refused, other.reservations.open_bookings) == (0, 1, 0)


def test_a_large_backlog_is_published_in_parts(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    for number in range(2 * MAX_PER_MESSAGE + 1):
        one.book(str(number), 0.0)
    sizes = []
    while one.diary.has_changes:
        sequence, message = one.next_message(0.0)
        sizes.append(len(message.booked))
        other.ledger.receive(1, sequence, message, 0.0)
    assert sizes == [MAX_PER_MESSAGE, MAX_PER_MESSAGE, 1]
    assert other.load(0.0) == one.load(0.0)


def test_the_session_and_the_future_blocks_of_a_rank_are_published_once(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    booking = one.reservations.book(RANK, (100, 1, 8, 40), 0.0)
    one.diary.booked("a", RANK, booking, BookingMessage(77, [1, 2**64 - 1]))
    deliver(one, other, 0.0)
    one.diary.first_token(booking)
    sequence, again = one.next_message(0.1)
    other.ledger.receive(1, sequence, again, 0.1)
    assert other.learnt == [(RANK, BookingMessage(77, [1, 2**64 - 1]))]
    assert (again.booked[0].session, again.booked[0].prefix) == (77, b"")


def test_a_short_request_is_remembered_and_leaves_no_load(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    booking = one.reservations.book(RANK, (100, 1, 8, 40), 0.0)
    one.diary.booked("a", RANK, booking, BookingMessage(77))
    one.reservations.release(booking)
    one.diary.ended(booking)
    deliver(one, other, 0.0)
    assert other.learnt == [(RANK, BookingMessage(77, []))]
    assert other.ledger.open == 0
    assert not one.diary.has_changes


def test_a_new_router_gets_all_earlier_bookings(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    one.book("a", 0.0)
    one.book("b", 0.0)
    one.diary.discard_changes(0.0)
    one.end("b")
    one.diary.discard_changes(0.1)
    assert one.diary.take(0.1) is None
    one.diary.republish_all()
    deliver(one, other, 0.2)
    assert other.load(0.2) == one.load(0.2)


ANY = st.sampled_from([-1, 0, 1, 50, 2**40 - 1, 2**40, 2**63, 2**70])
ANY_LOAD = st.builds(
    BookedLoad,
    id=st.sampled_from(["a", "b", "c", "x" * 500]),
    worker_id=st.sampled_from([7, 8, 9]),
    rank=st.integers(-1, 2),
    prefill_tokens=ANY,
    blocks=ANY,
    steps=ANY,
    age_seconds=st.floats(),
    session=ANY,
    prefix=st.binary(max_size=40),
)
ANY_MESSAGE = st.builds(
    ReservationsChanged,
    router=st.integers(0, 3),
    booked=st.lists(ANY_LOAD, max_size=4).map(tuple),
    ended=st.just(("a", "zz")),
)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64), ANY_MESSAGE, st.booleans()), max_size=30))
def test_nothing_that_a_stranger_says_raises_or_makes_a_sum_negative(
    messages: list[tuple[int, int, ReservationsChanged, bool]],
) -> None:
    receiver = Peer(99)
    for now, (publisher, sequence, message, whole) in enumerate(messages):
        if whole:
            receiver.ledger.replace(
                ReservationsDescribed(
                    router=message.router, publisher_id=publisher, sequence=sequence, booked=message.booked
                ),
                float(now),
            )
        else:
            receiver.ledger.receive(publisher, sequence, message, float(now))
        assert np.min(receiver.reservations.load(receiver.rows, float(now))) >= 0
    receiver.ledger.sweep(len(messages) + 10.0)
    assert receiver.reservations.open_bookings == receiver.ledger.open == 0


STEP = st.tuples(
    st.sampled_from(["book", "first", "emit", "end", "publish", "list", "restart", "pass", "report"]),
    st.integers(0, 2),
    st.integers(0, 2**16),
)


@settings(max_examples=150)
@given(st.lists(STEP, max_size=120), st.integers(0, 2**32))
def test_whatever_is_lost_or_doubled_or_late_sums_stay_above_zero_everything_ends_and_all_agree_at_last(
    steps: list[tuple[str, int, int]], seed: int
) -> None:
    """Three routers. Messages and lists in flight are delivered in random order, some never and some
    twice."""
    network = random.Random(seed)
    peers = [Peer(name) for name in (1, 2, 3)]
    under_way: list[tuple[Peer, int, ReservationsChanged | ReservationsDescribed]] = []
    now, named, gone = 0.0, 0, set[int]()
    for what, at, number in steps:
        peer = peers[at]
        some = sorted(peer.open)
        match what:
            case "book":
                named += 1
                peer.book(f"{named}", now, RANKS[number % 3], (number % 700, 1, number % 50, number % 300))
            case "first" if some:
                peer.first_token(some[number % len(some)])
            case "emit" if some:
                peer.emitted(some[number % len(some)], number % 100)
            case "end" if some:
                peer.end(some[number % len(some)])
            case "publish":
                under_way.append((peer, *peer.next_message(now)))
            case "list":
                under_way.append((peer, -1, peer.described(now)))
            case "restart":
                gone.add(peer.name)
                peers[at] = Peer(10 + len(gone) + 10 * peer.name)
            case "pass":
                now += number / 2**17
                for each in peers:
                    each.ledger.sweep(now)
            case "report":
                peer.reservations.report(
                    RANKS[number % 3], (number % 500, number % 9, number % 90, number % 400), now
                )
        for _ in range(network.randrange(3)):
            if under_way:
                _deliver(peers, *under_way[network.randrange(len(under_way))], now)
        if network.random() < 0.4 and under_way:
            under_way.pop(network.randrange(len(under_way)))
        for each in peers:
            assert np.min(each.reservations.load(each.rows, now)) >= 0
            assert each.reservations.open_bookings == len(each.open) + each.ledger.open
    now += 10.0
    for each in peers:
        each.ledger.sweep(now)
        assert each.ledger.open == 0
    _converge(peers, now)


def _deliver(
    peers: list[Peer],
    sender: Peer,
    sequence: int,
    message: ReservationsChanged | ReservationsDescribed,
    now: float,
) -> None:
    for peer in peers:
        if peer.name == sender.name:
            continue
        if isinstance(message, ReservationsChanged):
            peer.ledger.receive(sender.name, sequence, message, now)
        else:
            peer.ledger.replace(message, now)


def _converge(peers: list[Peer], now: float) -> None:
    """Stop losing messages. All routers must then know the same, except for progress too small to publish."""
    for _ in range(2):
        for sender in peers:
            sequence, message = sender.next_message(now)
            for peer in peers:
                if peer is not sender and (
                    peer.ledger.receive(sender.name, sequence, message, now).incomplete
                    or peer.ledger.incomplete(sender.name)
                ):
                    assert peer.ledger.replace(sender.described(now), now)
    loads = [peer.reservations.load(peer.rows, now + 100.0) for peer in peers]  # reports have gone stale
    for load in loads:
        assert (load[[PREFILL, SEQUENCES]] == loads[0][[PREFILL, SEQUENCES]]).all()
        assert np.abs(load[STEPS] - loads[0][STEPS]).max() <= 75 * sum(len(peer.open) for peer in peers)
