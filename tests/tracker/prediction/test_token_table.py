"""Evidence of single tokens about clusters."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tracker.prediction.token_table import MIN_CHANGE, PRIOR, TokenTable

K = 4
HOUR = 3600.0


def made(buckets: int = 1000, seconds: float = 4 * HOUR) -> TokenTable:
    return TokenTable(buckets * (6 * K + 5), K, seconds)


def learn(table: TokenTable, tokens: list[int], cluster: int, now: float = 0.0, weight: float = 1.0) -> None:
    buckets, repeats = np.unique(np.array(tokens) % table.buckets, return_counts=True)
    table.learn(buckets, repeats, np.eye(K, dtype=np.float32)[cluster], weight, now)


def ratio(table: TokenTable, token: int) -> NDArray[np.float32]:
    return table.ratios(np.array([token]))[0]


def test_ratios_are_those_of_naive_bayes() -> None:
    table = made()
    for cluster, tokens in enumerate(([1, 2], [1, 3], [1, 4], [1, 5])):
        for _ in range(50):
            learn(table, tokens, cluster)
    assert ratio(table, 1) == pytest.approx(0.0, abs=1e-5)
    expected = (50 * np.eye(K)[0] + PRIOR / K) / (50 + PRIOR) * K
    assert ratio(table, 2) == pytest.approx(np.log(expected), rel=1e-4)


def test_a_token_nobody_saw_says_nothing_and_a_rare_one_little() -> None:
    table = made()
    assert not ratio(table, 9).any()
    for at in range(40):
        learn(table, [at % K], at % K)
    learn(table, [50], 2)
    assert ratio(table, 9) == pytest.approx(0.0, abs=1e-6)
    assert 0 < ratio(table, 50)[2] < 0.5 * ratio(table, 2)[2]


def test_clusters_nobody_is_in_stay_at_zero() -> None:
    table = made()
    for at in range(40):
        learn(table, [at % 2], at % 2)
    assert not ratio(table, 0)[2:].any()


def test_repetitions_within_a_text_count_less() -> None:
    once, often = made(), made()
    for table, tokens in ((once, [[1]] * 16), (often, [[1] * 16])):
        for each in tokens:
            learn(table, each, 0)
        for at in range(4 * 200):
            learn(table, [100 + at], at % K)
    assert ratio(once, 1)[0] > ratio(often, 1)[0]


def test_what_was_long_ago_counts_less() -> None:
    table = made(seconds=HOUR)
    for _ in range(50):
        learn(table, [7], 0)
        learn(table, [8], 1)
    before = ratio(table, 7)
    for _ in range(50):
        learn(table, [7, 9], 1, 20 * HOUR)
        learn(table, [8], 0, 20 * HOUR)
    assert before[0] > 0.5
    assert ratio(table, 7)[1] > 0.3
    assert ratio(table, 7)[0] < -1.0
    assert np.isfinite(table.ratios(np.arange(10))).all()


def test_the_default_budget_holds_a_large_vocabulary_and_a_small_one_folds_it() -> None:
    assert TokenTable(32 << 20, 32, HOUR).buckets >= 150_000
    small = TokenTable(1 << 20, 32, HOUR)
    assert small.nbytes <= 1 << 20
    assert 5000 < small.buckets < 150_000
    with pytest.raises(ValueError, match="holds no row"):
        TokenTable(10, 32, HOUR)


def test_ids_beyond_the_buckets_share_them() -> None:
    table = made(buckets=10)
    learn(table, [13], 2)
    learn(table, [25], 1)
    assert table.change(5)[0].tolist() == [3, 5]


def told_by(table: TokenTable, changes: list[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.float16]:
    copy = np.zeros((table.buckets, K), np.float16)
    for buckets, ratios in changes:
        copy[buckets] = ratios
    return copy


def test_changes_add_up_to_what_is_told_and_at_last_to_what_is() -> None:
    table, random, changes = made(), np.random.default_rng(0), []
    for _ in range(50):
        cluster = int(random.integers(K))
        learn(table, (100 * cluster + random.integers(0, 30, 20)).tolist(), cluster)
        changes.append(table.change(8))
        assert len(changes[-1][0]) <= 8
        buckets, ratios = table.published()
        copy = told_by(table, changes)
        assert (copy[buckets] == ratios).all()
        assert not np.delete(copy, buckets, axis=0).any()
    while len((change := table.change(8))[0]):
        changes.append(change)
    everything = np.arange(table.buckets)
    assert np.abs(told_by(table, changes) - table.ratios(everything)).max() < MIN_CHANGE + 0.01


def test_the_largest_change_is_told_first() -> None:
    table = made()
    for at in range(40):
        learn(table, [20 + at % K], at % K)
    learn(table, [1], 0)
    assert table.change(K)[0].tolist() == [20, 21, 22, 23]
    assert table.change(K)[0].tolist() == [1]


def test_settling_tells_all() -> None:
    table = made()
    for at in range(40):
        learn(table, list(range(at, at + 20)), at % K)
    table.publish_all()
    assert len(table.change(100)[0]) == 0
    buckets, ratios = table.published()
    assert ratios == pytest.approx(table.ratios(buckets.astype(np.int64)), abs=0.01)


def test_what_is_moved_is_neither_lost_nor_doubled() -> None:
    table = made()
    for at in range(60):
        learn(table, [at % 3], at % 3)
    before = ratio(table, 1)
    table.move(1, 3, 0.25)
    assert ratio(table, 1)[[1, 3]] == pytest.approx(before[1], abs=0.05)
    table.move(3, 1, 1.0)
    assert ratio(table, 1) == pytest.approx(before, abs=1e-4)


def test_a_restart_changes_nothing() -> None:
    table, again = made(), made()
    for at in range(40):
        learn(table, [at, 500 + at % 7], at % K, at * 1000.0)
    table.change(5)
    again.take_over(table.state())
    assert again.state() == table.state()
    for one in (table, again):
        learn(one, [3], 1, 50_000.0)
        one.change(7)
    assert again.state() == table.state()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"clusters": 7}, "this one"),
        ({"totals": b""}, "do not go with"),
        ({"mass": np.full(K, -np.inf).tobytes()}, "finite"),
        ({"top": 1 << 30}, "do not go with"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(broken: dict[str, Any], said: str) -> None:
    table = made()
    learn(table, [1, 2], 0)
    with pytest.raises(ValueError, match=said):
        made().take_over(table.state() | broken)
