"""A large step is cut between sequences into even parts, and the parts run side by side."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.sequence_parallel import ThreadTeam, share


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 4), st.integers(1, 200))
def test_the_parts_are_whole_sequences_in_order_and_none_is_small(tokens, threads, min_tokens):
    parts = share(tokens, threads, min_tokens)
    assert 1 <= len(parts) <= threads
    assert [count for part in parts for count in tokens[part]] == tokens
    if len(parts) > 1:
        sums = [sum(tokens[part]) for part in parts]
        assert min(sums) >= min_tokens
        assert max(sums) - min(sums) <= 2 * max(tokens), "even, as far as whole sequences can be"


def test_equal_sequences_are_shared_evenly():
    assert share([128] * 4, 2) == [slice(0, 2), slice(2, 4)]
    assert share([1] * 12 + [128] * 4, 2) == [slice(0, 14), slice(14, 16)]
    assert share([128] * 4, 4) == [slice(at, at + 1) for at in range(4)]


def test_small_steps_and_single_sequences_are_left_whole():
    assert share([], 2) == [slice(0, 0)]
    assert share([1] * 16, 2) == [slice(0, 16)]
    assert share([512], 2) == [slice(0, 1)]
    assert share([1, 500], 2) == [slice(0, 2)]


@pytest.fixture
def team():
    team = ThreadTeam(3)
    yield team
    team.close()


def test_calls_run_at_the_same_time_and_answer_in_order(team):
    meeting = threading.Barrier(3, timeout=5)

    def call(number):
        meeting.wait()
        return number, threading.get_ident()

    found = team.run([lambda number=number: call(number) for number in range(3)])
    assert [number for number, _ in found] == [0, 1, 2]
    assert len({thread for _, thread in found}) == 3
    assert found[0][1] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_heard_after_all_calls_have_ended(team, failing):
    go, ended = threading.Event(), []

    def good():
        assert go.wait(5)
        ended.append(True)

    def bad():
        go.set()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        team.run([bad, good] if failing == 0 else [good, bad])
    assert ended == [True]


def test_a_crew_of_nobody_is_refused():
    with pytest.raises(ValueError, match="0 threads"):
        ThreadTeam(0)
