"""Policy of the wait queue: order of admission, load shedding, and no starvation."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.completions import ApiError
from router.admission.queue_policy import (
    AGED_EVERY,
    CONTINUES,
    PriorityQueue,
    QueueBounds,
    Rate,
    Waiter,
    class_of,
    retry_after,
)

ROOM = QueueBounds(1000, 1_000_000)
NEVER_AGED = -math.inf
CLASSES = ("high", "normal", "low")


def waiter(
    urgency: int = 1, came: float = 0.0, *, until: float = 10.0, size: int = 1, model: str = "m"
) -> Waiter:
    return Waiter(model, urgency, came, until, size)


def queue_of(*waiters: Waiter, room: QueueBounds = ROOM) -> PriorityQueue[Waiter]:
    queue: PriorityQueue[Waiter] = PriorityQueue()
    for one in waiters:
        assert queue.offer(one, room).accepted
    return queue


def test_continuations_come_first_then_classes_then_arrival() -> None:
    low, late, early, high, begun = (
        waiter(2, 0.0),
        waiter(1, 3.0),
        waiter(1, 1.0),
        waiter(0, 4.0),
        waiter(CONTINUES, 5.0),
    )
    queue = queue_of(low, late, early, high, begun)
    assert list(queue.in_order("m", NEVER_AGED)) == [begun, high, early, late, low]
    assert list(queue.in_order("other", NEVER_AGED)) == []


def test_those_that_came_at_once_keep_the_order_in_which_they_were_offered() -> None:
    waiters = [waiter(1, 2.0) for _ in range(5)]
    assert list(queue_of(*waiters).in_order("m", NEVER_AGED)) == waiters


def test_a_full_queue_sheds_the_least_urgent_and_of_these_the_youngest() -> None:
    old, young, normal = waiter(2, 0.0), waiter(2, 1.0, model="other"), waiter(1, 0.0)
    queue = queue_of(old, young, normal)
    full = QueueBounds(3, 100)
    assert queue.offer(waiter(0, 2.0), full).shed == (young,)
    assert queue.offer(waiter(0, 3.0), full).shed == (old,)
    assert queue.offer(waiter(0, 4.0), full).shed == (normal,)
    assert queue.offer(waiter(0, 5.0), full) == (False, ())


def test_no_request_is_shed_for_one_of_its_own_or_a_lower_class() -> None:
    queue = queue_of(waiter(1), waiter(1))
    for urgency in (1, 2):
        assert queue.offer(waiter(urgency, 1.0), QueueBounds(2, 100)) == (False, ())
    assert len(queue) == 2


def test_continuations_are_never_shed() -> None:
    queue = queue_of(waiter(CONTINUES), waiter(CONTINUES))
    for urgency in (CONTINUES, 0):
        assert not queue.offer(waiter(urgency), QueueBounds(2, 100)).accepted


def test_no_request_is_shed_in_vain() -> None:
    queue = queue_of(waiter(2, size=10), waiter(1, size=80))
    assert queue.offer(waiter(1, size=40), QueueBounds(10, 100)) == (
        False,
        (),
    )  # shedding the low one would not free enough
    assert queue.offer(waiter(0, size=101), QueueBounds(10, 100)) == (False, ())
    assert len(queue) == 2
    assert len(queue.offer(waiter(0, size=40), QueueBounds(10, 100)).shed) == 2


def test_a_queue_without_room_takes_no_request() -> None:
    queue: PriorityQueue[Waiter] = PriorityQueue()
    assert not queue.offer(waiter(CONTINUES), QueueBounds(0, 100)).accepted


def test_whose_time_is_up_is_taken_out_once() -> None:
    first, second = waiter(until=1.0), waiter(until=5.0)
    queue = queue_of(first, second)
    assert queue.ended(0.9) == []
    assert queue.ended(1.0) == [first]
    assert queue.ended(1.0) == []
    queue.end(second, 2.0)
    assert queue.ended(2.5) == [second]
    assert (len(queue), queue.bytes, queue.models) == (0, 0, [])


def test_an_aged_request_gets_one_place_in_four_whatever_comes() -> None:
    old = waiter(2, 0.0)
    queue = queue_of(old, *(waiter(0, 10.0 + number) for number in range(20)))
    order = list(queue.in_order("m", aged_before=5.0))
    assert order.index(old) == AGED_EVERY - 1
    assert list(queue.in_order("m", aged_before=-1.0)).index(old) == 20


def test_a_new_request_passes_over_none_as_urgent_or_aged() -> None:
    queue = queue_of(waiter(1, 5.0))
    assert [queue.passes_over("m", urgency, NEVER_AGED) for urgency in (CONTINUES, 0, 1, 2)] == [
        False,
        False,
        True,
        True,
    ]
    assert queue.passes_over("m", 0, aged_before=5.0)
    assert not queue.passes_over("other", 2, aged_before=9.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=60, max_size=60),
    st.data(),
)
def test_no_request_starves(aged: list[int], later: list[int], data: st.DataObject) -> None:
    """Admit one request at a time, with two new arrivals each: at most (AGED_EVERY - 1) * k later ones
    overtake the k-th oldest aged request.
    """
    old = [waiter(urgency, float(at)) for at, urgency in enumerate(aged)]
    queue = queue_of(*old)
    given_to: list[Waiter] = []
    arrivals = iter(later)
    while len(given_to) < 25 and any(one in queue for one in old):
        for urgency in (next(arrivals), next(arrivals)):
            queue.offer(waiter(urgency, 100.0 + len(given_to)), ROOM)
        for one in list(queue.in_order("m", aged_before=50.0))[: data.draw(st.integers(1, 3))]:
            queue.placed(one, aged_before=50.0)
            given_to.append(one)
    for rank, one in enumerate(sorted(old, key=lambda one: one.came), start=1):
        if one in given_to:
            passed = sum(other not in old for other in given_to[: given_to.index(one)])
            assert passed <= (AGED_EVERY - 1) * rank
        else:
            assert len(given_to) < AGED_EVERY * rank + 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 9)), max_size=20),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_admitting_one_by_one_follows_the_predicted_order(
    came: list[tuple[int, int]], aged: int, passed: int
) -> None:
    queue = queue_of(
        *(waiter(urgency, float(at)) for urgency, at in came),
        *(waiter(0, 20.0) for _ in range(passed)),
        waiter(2, 0.0),
    )
    for _ in range(passed):
        queue.placed(next(queue.in_order("m", float(aged))), float(aged))
    expected_order = list(queue.in_order("m", float(aged)))
    given_to = []
    while len(queue):
        given_to.append(next(queue.in_order("m", float(aged))))
        queue.placed(given_to[-1], float(aged))
    assert given_to == expected_order


class Ledger(RuleBasedStateMachine):
    """Reference model: any order of offers, admissions, deadlines and cancellations, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: PriorityQueue[Waiter] = PriorityQueue()
        self.held: list[Waiter] = []
        self.now = 0.0

    @rule(
        urgency=st.integers(-1, 2),
        size=st.integers(0, 40),
        wait=st.integers(1, 20),
        model=st.sampled_from("ab"),
    )
    def offer(self, urgency: int, size: int, wait: int, model: str) -> None:
        room = QueueBounds(6, 100)
        one = waiter(urgency, self.now, until=self.now + wait, size=size, model=model)
        accepted, shed = self.queue.offer(one, room)
        assert all(other.urgency > urgency for other in shed)
        assert accepted or not shed
        stayed = [other for other in self.held if other not in shed]
        assert all(
            (other.urgency, other.came, other.number)
            <= min((gone.urgency, gone.came, gone.number) for gone in shed)
            for other in stayed
            if shed
        )
        self.held = [*stayed, one] if accepted else stayed
        if not accepted:
            urgent = [other for other in self.held if other.urgency <= urgency]
            assert len(urgent) >= room.requests or sum(other.size for other in urgent) + size > room.bytes

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        over = self.queue.ended(self.now)
        assert set(over) == {one for one in self.held if one.until <= self.now}
        self.held = [one for one in self.held if one not in over]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), gets=st.booleans())
    def leave(self, data: st.DataObject, gets: bool) -> None:
        one = data.draw(st.sampled_from(self.held))
        if gets:
            self.queue.placed(one, self.now - 5)
        else:
            assert self.queue.remove(one)
        assert not self.queue.remove(one)
        self.held.remove(one)

    @invariant()
    def everybody_is_there_once(self) -> None:
        listed = [one for model in self.queue.models for one in self.queue.in_order(model, self.now - 5)]
        assert len(listed) == len(set(listed)) == len(self.queue) == len(self.held)
        assert set(listed) == set(self.held)
        assert self.queue.bytes == sum(one.size for one in self.held)
        assert sorted(self.queue.models) == sorted({one.model for one in self.held})


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_retry_after_is_what_the_drain_rate_says_within_bounds() -> None:
    rate = Rate(0.0)
    assert rate.per_second(0.0) == rate.per_second(5.0) == 0.0
    for number in range(1, 401):
        rate.count(number / 20)
        assert number < 5 or rate.per_second(number / 20) == pytest.approx(20.0, rel=0.05)
    assert retry_after(99, 20.0, 2.0) == 5.0
    assert retry_after(0, 20.0, 2.0) == 1.0
    assert retry_after(10_000, 1.0, 2.0) == 60.0
    assert retry_after(5, 0.0, 2.5) == 2.5
    assert rate.per_second(80.0) < 0.1


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (None, "normal"),
        ("", "normal"),
        ("high", "high"),
        ("low", "low"),
        (0, "normal"),
        (-1, "high"),
        (-7, "high"),
        (1, "low"),
        (99, "low"),
        ("-1", "high"),
        ("2", "low"),
    ],
)
def test_a_class_is_named_or_counted_from_the_default_one(said: str | int | None, named: str) -> None:
    assert CLASSES[class_of(said, CLASSES, "normal")] == named


@pytest.mark.parametrize("said", ["urgent", "1.5", "--1", "HIGH", "٣x"])
def test_an_unknown_class_is_refused_with_the_names_there_are(said: str) -> None:
    with pytest.raises(ApiError, match="high, normal, low") as refused:
        class_of(said, CLASSES, "normal")
    assert (refused.value.status, refused.value.param) == (400, "priority")


def test_names_that_look_like_numbers_are_names() -> None:
    classes: Sequence[str] = ("0", "1", "2")
    assert class_of("2", classes, "1") == 2
    assert class_of(1, classes, "1") == 2
