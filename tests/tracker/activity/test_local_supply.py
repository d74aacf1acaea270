"""Placement against demand, counted expert by expert."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.layout import EP, Layout, experts_tp, tp
from fleet.placement import Placement, linear, with_rows
from tracker.activity.local_supply import DOUBT, NAMED, LocalSupply

LAYERS, EXPERTS, RANKS = 3, 8, 4


def supply(placement: Placement | None = None, layout: Layout | None = None) -> LocalSupply:
    return LocalSupply.of((placement or linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS)).record(), layout)


tables = st.lists(st.integers(0, 200), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS).map(
    lambda values: np.array(values, np.float32).reshape(LAYERS, EXPERTS)
)


@given(tables, st.integers(0, RANKS - 1), st.sets(st.integers(0, LAYERS - 1)))
def test_the_lists_and_the_share_are_what_counting_expert_by_expert_gives(
    pairs: np.ndarray, rank: int, sharded: set[int]
) -> None:
    placement = with_rows(
        linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS), dict.fromkeys(sharded), epoch=0
    )
    known, rates = (
        supply(placement, Layout(attention="dp", sharded=tuple(sorted(sharded)))),
        pairs / np.float32(20),
    )
    held = {(layer, int(expert)) for layer in range(LAYERS) for expert in placement.on_rank(rank)[layer]}
    cells = [(layer, expert) for layer in range(LAYERS) if layer not in sharded for expert in range(EXPERTS)]
    total = sum(float(rates[cell]) for cell in cells)
    away = sum(float(rates[cell]) for cell in cells if cell not in held)
    assert known.remote(rank, rates) == (None if total == 0 else pytest.approx(away / total, rel=1e-6))
    wanted = [cell for cell in cells if cell not in held and pairs[cell] > DOUBT * sqrt(pairs[cell])]
    assert known.wanted_remote(rank, rates, pairs) == _named(
        sorted(wanted, key=lambda cell: (-rates[cell], cell)), rates
    )
    idle = [
        cell
        for cell in cells
        if cell in held and pairs[cell] + DOUBT * sqrt(pairs[cell] + 1) < 0.5 * pairs[cell[0]].mean()
    ]
    assert known.local_idle(rank, rates, pairs) == _named(
        sorted(idle, key=lambda cell: (rates[cell], cell)), rates
    )


def _named(cells: list[tuple[int, int]], rates: np.ndarray) -> tuple[tuple[int, int, float], ...]:
    return tuple((layer, expert, float(rates[layer, expert])) for layer, expert in cells[:NAMED])


def test_without_evidence_nothing_is_remote_wanted_or_idle() -> None:
    nothing = np.zeros((LAYERS, EXPERTS), np.float32)
    assert supply().remote(0, nothing) is None
    assert supply().wanted_remote(0, nothing, nothing) == ()
    assert supply().local_idle(0, nothing, nothing) == ()


def test_a_little_demand_is_judged_by_its_share_and_not_deflated() -> None:
    rates = np.zeros((LAYERS, EXPERTS), np.float32)
    rates[:, EXPERTS - 1] = 1e-3
    assert supply().remote(0, rates) == 1.0
    assert supply().remote(RANKS - 1, rates) == 0.0


def test_few_pairs_name_nobody() -> None:
    pairs = np.full((LAYERS, EXPERTS), 1.0, np.float32)
    assert supply().wanted_remote(0, pairs, pairs) == ()
    assert supply().local_idle(0, pairs, pairs) == ()


def test_where_experts_are_sharded_no_rank_is_nearer() -> None:
    rates = np.ones((LAYERS, EXPERTS), np.float32)
    for layout in (tp(LAYERS), experts_tp(LAYERS)):
        assert supply(layout=layout).remote(0, rates) is None
        assert supply(layout=layout).wanted_remote(0, rates, 100 * rates) == ()
    assert supply(layout=EP).remote(0, rates) == pytest.approx(0.75)


def test_only_the_clearest_are_named() -> None:
    wide = linear(layers=1, experts=64, ranks=2)
    rates = np.arange(1.0, 65.0, dtype=np.float32)[None]
    named = LocalSupply.of(wide.record(), None).wanted_remote(0, rates, 100 * rates)
    assert [expert for _, expert, _ in named] == list(range(63, 63 - NAMED, -1))


def test_a_replica_makes_an_expert_local() -> None:
    slots = np.array([[0, 1, 2, -1, 2, 3, 0, -1]])
    known = LocalSupply.of(Placement(slots, experts=4, ranks=2).record(), None)
    assert known.remote(0, np.array([[1.0, 1.0, 1.0, 1.0]])) == pytest.approx(0.25)
    assert known.remote(1, np.array([[1.0, 1.0, 1.0, 1.0]])) == pytest.approx(0.25)


def test_a_placement_that_contradicts_itself_is_refused() -> None:
    record = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS).record()
    with pytest.raises(ValueError, match="placement"):
        LocalSupply.of(
            type(record)(epoch=0, experts=EXPERTS, layers=LAYERS, ranks=RANKS, slots_per_rank=2, slots=b"1"),
            None,
        )
