"""KV units are copied out of other ranks' memory by a thread, in order, at a limited rate."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.switching.peer_pools import PeerPools, UnitReader
from engine_adapter.kv_switch.kv_state import UnitRead

UNITS = 64


@pytest.fixture
def own() -> KvPool:
    return KvPool(
        pages=UNITS, groups=1, layers=2, kv_heads=1, head_dim=8, page_tokens=16, dtype=torch.float32
    )


@pytest.fixture
def theirs(own: KvPool) -> Iterator[np.ndarray]:
    return np.random.default_rng(1).integers(0, 256, (UNITS, own.unit_bytes), np.uint8)


def pools(own: KvPool, theirs: np.ndarray) -> PeerPools:
    return PeerPools(own, [np.empty((0, 0), np.uint8), theirs])


def ended(reader: UnitReader, count: int) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += reader.ended()
        time.sleep(0.001)
    return found


def test_units_arrive_in_order_and_the_last_one_is_announced(own: KvPool, theirs: np.ndarray) -> None:
    told = threading.Event()
    reader = UnitReader(pools(own, theirs), None, told.set)
    for number in range(40):
        reader.start(number, UnitRead(1, UNITS - 1 - number, number))
    assert ended(reader, 40) == list(range(40))
    assert told.wait(20)
    for number in range(40):
        assert np.array_equal(own.unit(number), theirs[UNITS - 1 - number])
    reader.close()


def test_a_limited_reader_keeps_its_rate_until_it_is_to_hurry(own: KvPool, theirs: np.ndarray) -> None:
    reader = UnitReader(pools(own, theirs), own.unit_bytes)  # A unit a second, in pieces of 64 KiB.
    for number in range(UNITS):
        reader.start(number, UnitRead(1, number, number))
    first = ended(reader, 1)
    time.sleep(0.1)
    assert len(first + reader.ended()) < UNITS
    reader.hurry()
    reader.close()
    assert np.array_equal(own.unit(UNITS - 1), theirs[UNITS - 1])


def test_a_closed_reader_can_be_used_again(own: KvPool, theirs: np.ndarray) -> None:
    reader = UnitReader(pools(own, theirs), None)
    for _ in range(3):
        reader.start(7, UnitRead(1, 3, 5))
        assert ended(reader, 1) == [7]
        reader.close()
    assert np.array_equal(own.unit(5), theirs[3])
