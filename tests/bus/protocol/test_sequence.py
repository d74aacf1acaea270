"""Sequence tracking against a plain set of received messages."""

import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.protocol.sequence import WINDOW, MessageOrder, Sequences

U64 = st.integers(0, (1 << 64) - 1)


def test_messages_in_order_are_told_from_the_first_one() -> None:
    sequences = Sequences()
    verdicts = [sequences.observe(7, number) for number in range(4)]
    assert [verdict.order for verdict in verdicts] == [
        MessageOrder.NEW,
        MessageOrder.IN_ORDER,
        MessageOrder.IN_ORDER,
        MessageOrder.IN_ORDER,
    ]
    assert sum(verdict.missing for verdict in verdicts) == 0


def test_a_consumer_that_starts_late_is_told_how_much_it_missed() -> None:
    verdict = Sequences().observe(7, 41)
    assert (verdict.order, verdict.missing) == (MessageOrder.NEW, 41)


def test_a_gap_names_the_number_of_missing_messages_and_late_ones_fill_it() -> None:
    sequences = Sequences()
    sequences.observe(7, 0)
    assert sequences.observe(7, 4).missing == 3
    assert [sequences.observe(7, number).order for number in (2, 2, 1, 3, 0, 4)] == [
        MessageOrder.LATE, MessageOrder.DUPLICATE, MessageOrder.LATE, MessageOrder.LATE, MessageOrder.DUPLICATE, MessageOrder.DUPLICATE,
    ]  # fmt: skip
    assert sequences.observe(7, 5).order is MessageOrder.IN_ORDER


def test_a_restarted_publisher_is_a_new_one() -> None:
    sequences = Sequences()
    sequences.observe(7, 100)
    assert sequences.observe(8, 0).order is MessageOrder.NEW


def test_what_a_snapshot_covers_counts_as_heard() -> None:
    sequences = Sequences()
    sequences.observe(7, 0)
    sequences.observe(7, 10)
    sequences.cover(7, 8)
    assert [sequences.observe(7, number).order for number in (3, 8, 9, 11)] == [
        MessageOrder.DUPLICATE,
        MessageOrder.DUPLICATE,
        MessageOrder.LATE,
        MessageOrder.IN_ORDER,
    ]
    sequences.cover(7, 20)
    assert sequences.observe(7, 15).order is MessageOrder.DUPLICATE
    assert sequences.observe(7, 21).order is MessageOrder.IN_ORDER
    sequences.cover(9, -1)
    assert sequences.observe(9, 0).order is MessageOrder.IN_ORDER
    assert sequences.newest(9) == 0


def test_the_publisher_silent_for_longest_is_forgotten_first() -> None:
    sequences = Sequences(limit=2)
    for publisher, number in ((1, 0), (2, 0), (1, 1), (3, 0)):
        sequences.observe(publisher, number)
    assert len(sequences) == 2
    assert sequences.observe(1, 2).order is MessageOrder.IN_ORDER
    assert sequences.observe(2, 1).order is MessageOrder.NEW
    sequences.forget(2)
    assert sequences.newest(2) is None


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Sequences().observe(7, -1)
    with pytest.raises(ValueError, match="0"):
        Sequences(limit=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=200))
def test_every_verdict_agrees_with_the_set_of_what_was_heard(arrivals: list[tuple[int, int]]) -> None:
    sequences = Sequences()
    window: dict[int, set[int]] = {}
    for publisher, number in arrivals:
        before = window.setdefault(publisher, set())
        verdict = sequences.observe(publisher, number)
        assert verdict.fresh == (number not in before)
        if not before:
            assert (verdict.order, verdict.missing) == (MessageOrder.NEW, number)
        elif number in before:
            assert verdict.order is MessageOrder.DUPLICATE
        elif number < max(before):
            assert verdict.order is MessageOrder.LATE
        else:
            assert verdict.missing == number - max(before) - 1
            assert verdict.order is (MessageOrder.GAP if verdict.missing else MessageOrder.IN_ORDER)
        before.add(number)


@given(st.permutations(list(range(40))), st.sets(st.integers(0, 39)), st.randoms(use_true_random=False))
def test_gaps_less_late_arrivals_are_exactly_what_was_lost(
    order: list[int], lost: set[int], random: object
) -> None:
    """Messages are lost, repeated and reordered within the window: the sum of the gaps minus the late
    messages is the loss.
    """
    arrivals = [number for number in order if number not in lost] * 2
    sequences = Sequences()
    counts: Counter[MessageOrder] = Counter()
    missing = 0
    for number in arrivals:
        verdict = sequences.observe(7, number)
        counts[verdict.order] += 1
        missing += verdict.missing
    came = {number for number in order if number not in lost}
    expected = max(came) + 1 - len(came) if came else 0
    assert missing - counts[MessageOrder.LATE] == expected
    assert counts[MessageOrder.DUPLICATE] == len(came)


@given(st.lists(U64, min_size=1, max_size=30))
def test_any_jump_of_any_size_is_taken_in_bounded_memory(numbers: list[int]) -> None:
    sequences = Sequences()
    for number in numbers:
        sequences.observe(1, number)
        assert sequences.observe(1, number).order is MessageOrder.DUPLICATE
        sequences.cover(1, number)
    assert sequences.newest(1) == max(numbers)
    assert len(pickle.dumps(sequences)) < 1000 + WINDOW / 8
