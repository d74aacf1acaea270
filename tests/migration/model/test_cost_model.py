"""Cost of a placement, compared with tokens drawn and dispatched one by one, and with explicit loops."""

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.dispatch import loads, served_by, shares
from fleet.placement import EMPTY, FULL, Placement, Split, linear
from fleet.timing import EngineSpeed
from migration.model.cost_model import (
    CostTerms,
    LinkSpeeds,
    Transfers,
    balance,
    expert_seconds,
    figures,
    payback,
    priced,
    step_ceiling,
    traffic,
    transfer_seconds,
)

NODE = np.array([0, 0, 1, 1])
SPEED = EngineSpeed(dispatch=2e-6, dispatch_node=5e-6, expert_pair=1e-7)


def placement(
    dice: np.random.Generator, layers: int = 2, experts: int = 6, ranks: int = 4, per: int = 3
) -> Placement:
    """Return a placement: every expert on its linear rank, plus random replicas with an uneven split."""
    table = linear(layers=layers, experts=experts, ranks=ranks, slots_per_rank=per).expert_of_slot.copy()
    for row in table.reshape(layers, ranks, per):
        for rank, slot in np.argwhere(row == EMPTY):
            free = np.setdiff1d(np.arange(experts), row[rank])
            row[rank, slot] = dice.choice(np.append(free, EMPTY))
    keep, spill, near = (np.zeros(table.shape, np.uint16) for _ in range(3))
    for layer, expert in product(range(layers), range(experts)):
        at = np.flatnonzero(table[layer] == expert)
        cuts = np.sort(dice.integers(0, FULL + 1, len(at) - 1))
        spill[layer, at] = np.diff(np.concatenate([[0], cuts, [FULL]]))
        keep[layer, at], near[layer, at] = dice.integers(0, FULL + 1, (2, len(at)))
    return Placement(table, experts=experts, ranks=ranks, split=Split(keep, spill, near))


def demand(
    dice: np.random.Generator, layers: int = 2, experts: int = 6, ranks: int = 4
) -> NDArray[np.float64]:
    return np.asarray(dice.random((ranks, layers, experts)) ** 2)


def by_slots(held: Placement, wanted: NDArray[np.float64], home: int) -> NDArray[np.float64]:
    """Return the pairs of a rank's tokens that each rank serves, [layers, ranks], from the dispatch
    shares."""
    part = shares(held, home, NODE)
    table = np.where(held.expert_of_slot == EMPTY, 0, held.expert_of_slot)
    pairs = part * np.take_along_axis(wanted[home], table, axis=1)
    return np.asarray(pairs.reshape(held.layers, held.ranks, -1).sum(axis=2))


@pytest.mark.parametrize("seed", range(3))
def test_who_serves_whom_is_what_tokens_are_sent_by(seed: int) -> None:
    dice = np.random.default_rng(seed)
    held, wanted = placement(dice), demand(dice)
    found = served_by(held, wanted, NODE)
    for home in range(4):
        assert np.allclose(found[:, :, home], by_slots(held, wanted, home))
    assert np.allclose(found.sum(axis=2), loads(held, wanted, NODE))


def test_distinct_destinations_are_those_of_tokens_drawn_one_by_one() -> None:
    dice = np.random.default_rng(5)
    held, wanted, top_k = placement(dice, layers=1), demand(dice, layers=1), 3
    terms = CostTerms(SPEED, NODE, top_k, step_tokens=1000.0)
    tokens = 1000.0 * wanted.sum(axis=(1, 2)) / wanted.sum()
    sent = traffic(held, wanted, terms)
    draws = 20_000
    seen = np.zeros((4, 4))
    for home in range(4):
        likely = by_slots(held, wanted, home)[0] / wanted[home].sum()
        chosen = dice.choice(4, size=(draws, top_k), p=likely)
        reached = (chosen[:, :, None] == np.arange(4)).any(axis=1)
        seen[home] = reached.mean(axis=0) * tokens[home]
        across = (
            np.stack([reached[:, NODE == node].any(axis=1) for node in (0, 1)], axis=1).mean(axis=0)
            * tokens[home]
        )
        assert sent.nodes_out[0, home] == pytest.approx(across[1 - NODE[home]], rel=0.02)
    np.fill_diagonal(seen, 0.0)
    assert sent.ranks_out[0] == pytest.approx(seen.sum(axis=1), rel=0.02)
    assert sent.ranks_in[0] == pytest.approx(seen.sum(axis=0), rel=0.02)
    assert sent.nodes_in.sum() == pytest.approx(sent.nodes_out.sum())


def test_seconds_are_those_of_the_slowest_rank_and_the_busiest_link_of_each_layer() -> None:
    dice = np.random.default_rng(2)
    held, wanted = placement(dice), demand(dice)
    terms = CostTerms(SPEED, NODE, 2, step_tokens=50.0)
    found, sent = figures(held, wanted, terms, memory_seconds=0.25), traffic(held, wanted, terms)
    scale = 50.0 * 2 * 2 / wanted.sum()
    load = loads(held, wanted, NODE)
    experts, dispatch = float(expert_seconds(load * scale, SPEED).sum()), 0.0
    for layer in range(2):
        dispatch += 2e-6 * max(max(sent.ranks_out[layer]), max(sent.ranks_in[layer])) + 5e-6 * max(
            max(sent.nodes_out[layer]), max(sent.nodes_in[layer])
        )
    assert found.seconds.experts == pytest.approx(experts)
    assert found.seconds.dispatch == pytest.approx(dispatch)
    assert found.seconds.total == pytest.approx(experts + dispatch + 0.25)
    assert priced(held, wanted, terms).seconds.sum() == pytest.approx(experts + dispatch)
    assert found.balance == pytest.approx(
        np.mean([load[layer].mean() / load[layer].max() for layer in range(2)])
    )
    assert found.local == pytest.approx(
        sum(by_slots(held, wanted, home)[:, home].sum() for home in range(4)) / wanted.sum()
    )


@pytest.mark.parametrize("uneven", [0.0, 0.05, 0.3])
def test_the_slowest_rank_of_a_step_is_as_slow_as_drawn_tokens_make_it(uneven: float) -> None:
    dice = np.random.default_rng(3)
    mean = 400.0 * (1.0 + uneven * dice.standard_normal((10, 32)))
    drawn = dice.poisson(mean, size=(400, 10, 32)).max(axis=2).mean(axis=0)
    assert expert_seconds(mean, EngineSpeed(expert_pair=1.0)).mean() == pytest.approx(drawn.mean(), rel=0.01)


def test_with_many_tokens_only_what_the_placement_leaves_uneven_counts() -> None:
    assert expert_seconds(np.array([[1e12, 3e12]]), EngineSpeed(expert_pair=1.0))[0] == pytest.approx(3e12)


def test_equal_demand_everywhere_reaches_as_many_ranks_as_independent_draws_do() -> None:
    held = linear(layers=3, experts=256, ranks=8)
    found = figures(held, np.ones((8, 3, 256)), CostTerms(SPEED, np.zeros(8, np.intp), 8, step_tokens=1024))
    assert found.remote_ranks == pytest.approx(7 * (1 - (7 / 8) ** 8))
    assert (found.remote_nodes, found.balance) == (0.0, 1.0)
    assert found.local == pytest.approx(1 / 8)


def test_without_demand_nothing_takes_time() -> None:
    found = figures(
        linear(layers=1, experts=4, ranks=2),
        np.zeros((2, 1, 4)),
        CostTerms(SPEED, np.zeros(2, np.intp), 2, step_tokens=8),
    )
    assert (found.seconds.total, found.balance, found.local, found.remote_ranks) == (0.0, 1.0, 1.0, 0.0)


def test_more_ranks_and_fewer_tokens_lower_what_a_step_can_reach() -> None:
    assert [round(step_ceiling(ranks, 1024 * ranks), 3) for ranks in (8, 32, 64)] == [0.957, 0.939, 0.932]
    assert step_ceiling(1, 10) == 1.0


def test_balance_of_an_idle_layer_is_one() -> None:
    assert balance(np.array([[0.0, 0.0], [1.0, 3.0]])).tolist() == [1.0, 2 / 3]


LINKS = LinkSpeeds(
    same_node=100.0, cross_node=10.0, checkpoint=5.0, checksum=50.0, handover_seconds=0.5, contention=0.1
)


def transfers(*rows: tuple[int, int, int, float]) -> Transfers:
    number, source, destination, size = zip(*rows, strict=True)
    return Transfers(np.array(number), np.array(source), np.array(destination), np.array(size))


def test_a_handover_takes_its_busiest_rank_over_its_slowest_link_and_handovers_follow_one_another() -> None:
    rows = transfers((0, 0, 1, 100.0), (0, 0, 1, 50.0), (0, 2, 1, 40.0), (0, 2, 3, 40.0), (1, -1, 0, 10.0))
    first = max(150 / 100, 40 / 10, 40 / 100) + 190 / 50 + 0.5
    assert transfer_seconds(rows, NODE, LINKS) == pytest.approx(first + 10 / 5 + 10 / 50 + 0.5)


def test_a_plan_pays_when_it_earns_its_cost_while_the_demand_lasts() -> None:
    rows = transfers((0, 0, 1, 100.0))
    cost = (100 / 100 + 100 / 50 + 0.5) * 0.1
    found = payback(0.01, 2.0, 60.0, rows, NODE, LINKS)
    assert (found.gain_per_second, found.bytes) == (0.02, 100)
    assert found.cost_seconds == pytest.approx(cost)
    assert found.after_seconds == pytest.approx(cost / 0.02)
    assert found.pays
    assert not payback(0.01, 2.0, 10.0, rows, NODE, LINKS).pays
    assert payback(0.0, 2.0, 60.0, rows, NODE, LINKS).after_seconds is None
    assert not payback(-0.01, 2.0, 60.0, rows, NODE, LINKS).pays


def test_what_copies_nothing_has_paid_at_once() -> None:
    nothing = Transfers(*(np.empty(0, np.intp),) * 3, np.empty(0))
    found = payback(0.01, 2.0, 60.0, nothing, NODE, LINKS)
    assert (found.after_seconds, found.transfer_seconds, found.bytes) == (0.0, 0.0, 0)
    assert found.pays


@pytest.mark.parametrize(
    "wrong", [{"same_node": 0.0}, {"contention": 2.0}, {"handover_seconds": float("nan")}]
)
def test_links_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="links"):
        LinkSpeeds(**{"same_node": 1.0, "cross_node": 1.0, **wrong})


def test_terms_out_of_range_are_refused() -> None:
    for wrong in ({"top_k": 0}, {"step_tokens": 0.0}, {"step_tokens": float("inf")}):
        with pytest.raises(ValueError, match="terms"):
            CostTerms(**{"speed": SPEED, "node": NODE, "top_k": 1, "step_tokens": 1.0, **wrong})  # type: ignore[arg-type]


def test_the_unit_of_the_demand_does_not_matter() -> None:
    dice = np.random.default_rng(1)
    held, wanted, terms = placement(dice), demand(dice), CostTerms(SPEED, NODE, 2, step_tokens=8)
    one, other = (figures(held, wanted * unit, terms) for unit in (1.0, 1024.0))
    assert one == other
