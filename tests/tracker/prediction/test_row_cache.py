"""Rows by key within a byte budget."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.prediction import ROW
from tracker.prediction.row_cache import TICKS, WAYS, RowCache, cell

LIFE = 3600.0
MEGABYTE = 1 << 20


def made(tokens: Any, mark: int = 1) -> NDArray[Any]:
    """Return rows [n] with these tokens of evidence."""
    cells = np.zeros(len(tokens), cell(0))
    cells["tokens"] = tokens
    cells["packed"][:, :2] = (mark, 255)
    return cells


def chain(blocks: int) -> NDArray[Any]:
    return made(16 * np.arange(1, blocks + 1))


def keys(seed: int, count: int) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(1, 1 << 63, count, dtype=np.uint64)


def test_a_row_is_found_again_and_replaced_by_a_later_one() -> None:
    rows, some = RowCache(MEGABYTE, LIFE, 100), keys(0, 10)
    rows.put(some, made([7] * 10), 0.0)
    rows.put(some[:1], made([8], 2), 0.0)
    assert rows.get(int(some[0])) == bytes([2, 255, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0])
    assert rows[int(some[1])] == bytes([1, 255, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0])
    assert rows.get(12345) is None
    assert rows.get(0) is None
    assert sorted(rows) == sorted(some.tolist())
    with pytest.raises(KeyError):
        rows[12345]


def test_a_budget_without_room_for_a_set_is_refused() -> None:
    with pytest.raises(ValueError, match="budget of 100 bytes"):
        RowCache(100, LIFE, 100)


def test_one_megabyte_is_kept_with_a_hundred_thousand_prefixes() -> None:
    random = np.random.default_rng(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rows = RowCache(MEGABYTE, LIFE, 32768)
    for at in range(100_000 // 64):
        rows.put(random.integers(1, 1 << 63, 64, dtype=np.uint64), chain(64), float(at), 0)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < MEGABYTE
    assert rows.nbytes < MEGABYTE
    assert len(rows) > 0.95 * rows.capacity


@pytest.mark.slow
def test_one_megabyte_is_kept_with_two_million_prefixes() -> None:
    hot, random = keys(2, 8192), np.random.default_rng(3)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rows = RowCache(MEGABYTE, 1e9, 32768)
    for at in range(2_000_000 // 4096):
        rows.put(random.integers(1, 1 << 63, 4096, dtype=np.uint64), chain(4096), float(at), 0)
        rows.put(hot[at % 128 * 64 : at % 128 * 64 + 64], chain(64), float(at), 0)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < MEGABYTE + 200_000, "the last batch of 4096 is not yet let go"
    assert (rows.find(hot) >= 0).mean() > 0.9


def test_what_is_used_again_and_again_survives_a_flood_of_keys_that_come_once() -> None:
    rows, hot, random = RowCache(MEGABYTE, 1e9, 100), keys(4, 4096), np.random.default_rng(5)
    for at in range(100_000 // 64):
        rows.put(random.integers(1, 1 << 63, 64, dtype=np.uint64), chain(64), float(at), 0)
        start = at % 64 * 64
        rows.put(hot[start : start + 64], chain(64), float(at), 0)
    assert (rows.find(hot) >= 0).mean() > 0.99


def test_a_newcomer_always_enters() -> None:
    rows, hot = RowCache(64 * 1024, 1e9, 100), keys(6, 20_000)
    for _ in range(3):
        rows.put(hot, made([16] * len(hot)), 0.0)
    rows.put(keys(7, 1), made([16]), 0.0)
    assert rows.get(int(keys(7, 1)[0])) is not None


def test_a_prefix_that_is_used_keeps_its_ancestors() -> None:
    rows, old, random = RowCache(256 * 1024, 1e9, 100), keys(8, 256), np.random.default_rng(9)
    rows.put(old, chain(256), 0.0, 0)
    for at in range(1000):
        if at % 10 == 0:
            assert rows.touch(int(old[-1]), float(at))
        rows.put(random.integers(1, 1 << 63, 64, dtype=np.uint64), chain(64), float(at), 0)
    assert (rows.find(old) >= 0).mean() > 0.98


def test_of_prefixes_of_one_age_the_ends_go_first() -> None:
    rows, random = RowCache(128 * 1024, 1e9, 100), np.random.default_rng(10)
    chains = [random.integers(1, 1 << 63, 64, dtype=np.uint64) for _ in range(200)]
    for one in chains:
        rows.put(one, chain(64), 0.0, 0)
    kept = np.mean([rows.find(one) >= 0 for one in chains[:-20]], axis=0)
    assert kept[:16].mean() > kept[-16:].mean() + 0.2


def test_a_row_nobody_touches_is_gone_after_its_life() -> None:
    rows, some = RowCache(MEGABYTE, LIFE, 100), keys(11, 3)
    rows.put(some, chain(3), 5.0, 0)
    rows.touch(int(some[1]), 2000.0)
    rows.advance(LIFE * (1 + 3 / TICKS) + 5.0)
    assert rows.get(int(some[2])) is None
    assert rows.get(int(some[1])) is not None
    assert rows.get(int(some[0])) is not None, "the ancestor of what was touched"
    assert len(rows) == 2
    rows.advance(1e9)
    assert len(rows) == 0
    rows.put(some, chain(3), 1e9, 0)
    rows.advance(1e9 + LIFE / 2)
    assert len(rows) == 3


def test_ticks_are_rebased_without_changing_ages() -> None:
    rows, some = RowCache(64 * 1024, LIFE, 100), keys(12, 2)
    for at in range(400):
        now = at * LIFE / 2
        rows.put(some[:1], chain(1), now)
    rows.put(some[1:], chain(1), now)
    rows.advance(now + 0.9 * LIFE)
    assert len(rows) == 2
    rows.advance(now + 1.1 * LIFE)
    assert len(rows) == 0


def test_changes_are_told_once_with_zeros_for_what_is_gone() -> None:
    rows, some = RowCache(MEGABYTE, LIFE, 100), keys(13, 4)
    rows.put(some, chain(4), 0.0, 0)
    told, values = rows.take()
    assert sorted(told.tolist()) == sorted(some.tolist())
    assert values.shape == (4, ROW)
    rows.put(some, chain(4), 1.0, 0)
    assert len(rows.take()[0]) == 0, "nothing about them changed"
    rows.advance(3 * LIFE)
    told, values = rows.take()
    assert len(told) == 4
    assert not values.any()


def test_more_changes_than_are_remembered_overflow() -> None:
    rows = RowCache(MEGABYTE, LIFE, 10)
    rows.put(keys(14, 11), chain(11), 0.0, 0)
    assert rows.overflown
    rows.take()
    assert not rows.overflown


def test_a_replica_that_follows_the_changes_equals_the_whole() -> None:
    rows, random, replica = RowCache(32 * 1024, 50.0, 4096), np.random.default_rng(15), dict[int, bytes]()
    for at in range(300):
        rows.put(
            random.integers(1, 3000, 8, dtype=np.uint64) + np.arange(8, dtype=np.uint64) * 3000,
            chain(8),
            float(at),
            0,
        )
        if at % 7 == 0:
            told, values = rows.take()
            for key, value in zip(told.tolist(), values, strict=True):
                if value.any():
                    replica[key] = value.tobytes()
                else:
                    replica.pop(key, None)
            everything, values = rows.all()
            assert replica == {
                key: value.tobytes() for key, value in zip(everything.tolist(), values, strict=True)
            }


def test_a_restart_changes_nothing() -> None:
    def worked(rows: RowCache, start: int) -> RowCache:
        random = np.random.default_rng(start)
        for at in range(start, start + 200):
            rows.put(
                random.integers(1, 1 << 14, 1, dtype=np.uint64) + np.arange(8, dtype=np.uint64),
                chain(8),
                float(at),
                0,
            )
            rows.touch(int(random.integers(1, 1 << 14)), float(at))
        return rows

    once = worked(RowCache(32 * 1024, 60.0, 500), 0)
    again = RowCache(32 * 1024, 60.0, 500)
    again.take_over(once.state())
    assert again.state() == once.state()
    assert worked(again, 200).state() == worked(once, 200).state()


def test_a_state_that_does_not_fit_is_refused() -> None:
    rows = RowCache(32 * 1024, 60.0, 500)
    rows.put(keys(16, 8), chain(8), 0.0)
    state = rows.state()
    with pytest.raises(ValueError, match="sets"):
        RowCache(64 * 1024, 60.0, 500).take_over(state)
    with pytest.raises(ValueError, match="lie where they cannot"):
        RowCache(32 * 1024, 60.0, 500).take_over(state | {"slots": np.arange(8, dtype="<u4").tobytes()})
    with pytest.raises(ValueError, match="do not go with"):
        RowCache(32 * 1024, 60.0, 500).take_over(state | {"uses": b""})


def test_keys_of_one_set_are_put_one_after_another() -> None:
    rows = RowCache(8192, 1e9, 10)
    some = keys(17, 500)
    rows.put(some, chain(500), 0.0, 0)
    assert len(rows) == rows.capacity
    assert rows.capacity % WAYS == 0
    assert all(rows.get(key) is not None for key in rows)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), max_size=200))
def test_a_single_row_is_put_as_a_batch_of_one_is(steps: list[tuple[int, int]]) -> None:
    one, batch = RowCache(9000, 100.0, 64), RowCache(9000, 100.0, 64)
    for now, (key, tokens) in enumerate(steps):
        one.put_one(key, made([tokens]), float(now))
        batch.put(np.array([key], np.uint64), made([tokens]), float(now))
        assert one.get(key) == made([tokens]).tobytes()
    assert one.state() == batch.state()


def test_key_zero_is_no_key() -> None:
    with pytest.raises(ValueError, match="0 is no key"):
        RowCache(9000, 100.0, 64).put_one(0, made([1]), 0.0)
