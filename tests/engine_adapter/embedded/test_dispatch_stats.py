"""Where tokens were sent is counted as one would by hand, whenever it is asked for, and never of two epochs
at once."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.embedded import dispatch_stats
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.engine import balance

FIELDS = ("remote_ranks", "local", "served", "balance")


@st.composite
def steps(draw: st.DrawFn, ranks: int, layers: int, top_k: int) -> list[FinishedStep]:
    """Steps of an engine, in each of which any rank has a token."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        tokens = random.integers(0, 5, ranks)
        tokens[random.integers(ranks)] += 1
        served_by = (
            [random.integers(0, ranks, (tokens.sum(), top_k)) for _ in range(layers)] if ranks > 1 else []
        )
        found.append(FinishedStep(float(random.random()), tokens.tolist(), served_by))
    return found


def by_hand(done: list[FinishedStep], rank: int, layers: int, top_k: int) -> dict[str, list[float]]:
    """Token by token, pair by pair."""
    found = {field: [0.0] * layers for field in FIELDS}
    for step in done:
        ranks = len(step.tokens_by_rank)
        home = [at for at in range(ranks) for _ in range(step.tokens_by_rank[at])]
        for layer in range(layers):
            load: Counter[int] = Counter()
            for token, owner in enumerate(home):
                by = step.served_by[layer][token].tolist() if ranks > 1 else [0] * top_k
                load.update(by)
                if owner == rank:
                    found["remote_ranks"][layer] += len(set(by) - {rank})
                    found["local"][layer] += by.count(rank)
            found["served"][layer] += load[rank]
            found["balance"][layer] += sum(load.values()) / ranks / max(load.values())
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_are_those_of_counting_by_hand_however_often_they_are_taken(data: st.DataObject) -> None:
    ranks, layers, top_k = (
        data.draw(st.sampled_from([1, 2, 4, 9])),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
    )
    done = data.draw(steps(ranks, layers, top_k))
    taken_after = data.draw(st.sets(st.integers(0, len(done) - 1)))
    everyones = np.zeros((2, layers))
    for rank in range(ranks):
        log = DispatchLog(rank, layers=layers, top_k=top_k)
        taken = []
        for at, step in enumerate(done):
            log.add(3, step)
            taken += log.take() if at in taken_after else ()
        taken += log.take()
        assert log.take() == ()
        total = taken[0]
        for more in taken[1:]:
            total = total.with_more(more)
        expected = by_hand(done, rank, layers, top_k)
        for field in FIELDS:
            assert getattr(total, field).tolist() == pytest.approx(expected[field]), field
        own = sum(step.tokens_by_rank[rank] for step in done)
        assert (total.epoch, total.steps, total.tokens, total.pairs) == (3, len(done), own, own * top_k)
        assert total.step_seconds == pytest.approx(sum(step.seconds for step in done))
        everyones += [total.served, [total.pairs] * layers]
    assert np.array_equal(*everyones), "what is sent is served"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sharded_layers_are_zero_and_the_others_count_as_ever(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    sharded = sorted(data.draw(st.sets(st.integers(0, 3))))
    whole = [layer for layer in range(4) if layer not in sharded]
    done = data.draw(steps(ranks, len(whole), 2))
    log = DispatchLog(0, layers=4, top_k=2)
    for step in done:
        log.add(1, step, sharded)
    (found,) = log.take()
    expected = by_hand(done, 0, len(whole), 2)
    for field in FIELDS:
        assert getattr(found, field)[whole].tolist() == pytest.approx(expected[field]), field
        assert not getattr(found, field)[sharded].any()
    assert found.tokens == sum(step.tokens_by_rank[0] for step in done)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_steps_of_two_epochs_are_never_counted_together(data: st.DataObject) -> None:
    done = data.draw(steps(2, 2, 2))
    epochs = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(done), max_size=len(done))))
    log = DispatchLog(1, layers=2, top_k=2)
    for epoch, step in zip(epochs, done, strict=True):
        log.add(epoch, step)
    for one in log.take():
        those = [step for epoch, step in zip(epochs, done, strict=True) if epoch == one.epoch]
        assert one.steps == len(those)
        assert one.served.tolist() == by_hand(those, 1, 2, 2)["served"]


def test_what_nobody_takes_is_bounded_in_steps_and_epochs_and_loses_nothing_of_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_stats, "KEPT_STEPS", 8)
    log, step = DispatchLog(0, layers=1, top_k=1), FinishedStep(0.5, [1, 0], [np.array([[1]])])
    for epoch in range(dispatch_stats.MAX_EPOCHS + 4):
        for _ in range(20):
            log.add(epoch, step)
    taken = log.take()
    assert [one.epoch for one in taken] == list(range(4, dispatch_stats.MAX_EPOCHS + 4))
    assert {(one.steps, one.step_seconds, one.remote_ranks[0]) for one in taken} == {(20, 10.0, 20.0)}


def test_reports_of_different_epochs_do_not_add() -> None:
    one, other = DispatchLog(0, layers=1, top_k=1), DispatchLog(0, layers=1, top_k=1)
    one.add(1, FinishedStep(0.1, [1], ()))
    other.add(2, FinishedStep(0.1, [1], ()))
    with pytest.raises(ValueError, match="cannot add dispatch counts of epoch 2 to those of epoch 1"):
        one.take()[0].with_more(other.take()[0])


def test_balance_is_mean_over_highest_and_one_where_there_is_nothing() -> None:
    assert balance(np.array([[4, 2, 0], [0, 0, 0], [1, 1, 1]])).tolist() == [0.5, 1.0, 1.0]


def test_communication_adds_up_over_steps_and_reports_and_is_unknown_where_one_part_is() -> None:
    log = DispatchLog(0, layers=1, top_k=1)
    for seconds in (0.01, 0.03):
        log.add(1, FinishedStep(0.1, [1], (), seconds))
    (first,) = log.take()
    assert first.communication_seconds == pytest.approx(0.04)
    assert first.with_more(first).communication_seconds == pytest.approx(0.08)
    assert first.with_more(replace(first, communication_seconds=None)).communication_seconds is None
