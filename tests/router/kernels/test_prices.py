"""The compiled prices are those of the table of terms, bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.arrays import FloatArray
from router import kernels
from router.fleet_state.target_table import TargetTable
from router.scheduling import cost
from router.scheduling.cost import TERMS, CostTerm, ExpectedLoad, RequestWork, Scores, Weights, score
from tests.router.decision_builders import view_of

Arguments = tuple[Any, ...]


def _fleet(chance: np.random.Generator, members: list[int], step: bool) -> TargetTable:
    """Engines of so many ranks, with speeds, distances and terms of every kind. step: ranks step together."""
    view, _ = view_of(*({"ranks": ranks} for ranks in members))
    table = view.target_table("demo")
    first = np.cumsum([0, *members])[:-1]

    def seconds(scale: float) -> FloatArray:
        return np.asarray(chance.gamma(0.7, scale, len(table.targets)) * (chance.random() < 0.9))

    return replace(
        table,
        prefill_token_s=seconds(1e-4),
        prefill_pair_s=seconds(1e-8),
        step_s=seconds(1e-2),
        decode_sequence_s=seconds(1e-4),
        decode_block_s=seconds(1e-5),
        decode_token_block_s=seconds(1e-6),
        dispatch_s=seconds(1e-6),
        dispatch_node_s=seconds(1e-5),
        expert_read_s=seconds(1e-5),
        gather_token_s=seconds(1e-6),
        first=first,
        in_lockstep=chance.integers(0, 2, len(table.targets)).astype(np.float64) if step else None,
        **{name: bool(chance.integers(2)) for name in ("apart", "pairs", "far", "reads", "gathers")},
    )


def _arguments(seed: int, members: list[int], step: bool) -> Arguments:
    """Arguments of `score` for a random request, some of them missing."""
    chance = np.random.default_rng(seed)
    targets = sum(members)

    def maybe(values: Any) -> Any:
        return values if chance.integers(2) else None

    sequences = chance.integers(0, 30, targets) * chance.integers(0, 2, targets)
    load = np.stack(
        [chance.integers(0, 9000, targets), sequences, sequences * 9, sequences * chance.integers(0, 90)]
    )
    prompt = int(chance.integers(1, 20_000))
    return (
        _fleet(chance, members, step),
        load,
        chance.integers(1, prompt + 1, targets),
        prompt,
        int(chance.integers(0, 500)),
        Weights(dict(zip(TERMS, chance.choice([0.0, 0.7, 1.0, 1.3], len(TERMS)).tolist(), strict=True))),
        maybe(ExpectedLoad.of(*chance.gamma(1.0, 5.0, (3, targets)), float(chance.random()))),
        maybe(chance.gamma(0.2, 1.0, targets)),
        maybe(chance.uniform(0.5, 2.0, (2, targets))),
        maybe(chance.gamma(0.2, 1.0, targets)),
    )


def _same(one: Scores, other: Scores) -> bool:
    pairs = ((one.terms, other.terms), (one.total, other.total), (one.outstanding, other.outstanding))
    return all(np.array_equal(a, b) and a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_both_forms_price_alike(seed: int, members: list[int], step: bool) -> None:
    arguments = _arguments(seed, members, step)
    with kernels.python_form():
        expected = score(*arguments)
    assert _same(score(*arguments), expected)


def test_the_library_has_every_term_of_the_table_in_its_order() -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    assert library.TERMS == TERMS


def test_a_term_that_the_library_lacks_is_priced_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new term works from its row in the table on; until it is compiled too, Python prices."""

    def seconds(work: RequestWork) -> FloatArray:
        return np.asarray(2.0 * work.added[0])

    arguments = _arguments(1, [3, 2], True)
    before = score(*arguments)
    terms = (*cost.COST_TERMS, CostTerm("new", seconds))
    monkeypatch.setattr(cost, "COST_TERMS", terms)
    monkeypatch.setattr(cost, "TERMS", (*TERMS, "new"))
    monkeypatch.setattr(cost, "_SECONDS", tuple(term.seconds for term in terms))
    weights = Weights({**arguments[5].by_term, "new": 1.0})
    after = score(*arguments[:5], weights, *arguments[6:])
    assert np.array_equal(after.terms[:-1], before.terms)
    assert np.array_equal(after.total, before.total + after.terms[-1])
    assert after.terms[-1].any()


def test_columns_that_do_not_fit_are_refused() -> None:
    table, load, *rest = _arguments(2, [2, 2], True)
    for wrong, message in (
        ({"step_s": table.step_s[:3]}, "same shape"),
        ({"step_s": None}, "same shape"),
        ({"first": np.array([0, 4])}, "do not ascend"),
        ({"first": np.array([1, 2])}, "do not ascend"),
        ({"first": np.array([0, 0])}, "do not ascend"),
    ):
        with pytest.raises(ValueError, match=message):
            score(replace(table, **wrong), load, *rest)
    with pytest.raises(ValueError, match="expected 16"):
        score(table, load[:3], *rest)
    with pytest.raises(ValueError, match="type 'f', expected 'l'"):
        score(table, load.astype(np.float32), *rest)


def test_columns_may_lie_anywhere_in_memory() -> None:
    table, load, uncached, *rest = _arguments(2, [2, 2], True)
    expected = score(table, load, uncached, *rest)
    assert _same(score(table, np.asfortranarray(load), np.repeat(uncached, 2)[::2], *rest), expected)
