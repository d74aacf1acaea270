"""Products with the parts of experts and of attention give a row the same bits alone and in any batch, for
every shape of a part."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_adapter.embedded.arena import Arena, unshardable
from engine_adapter.embedded.attention import Projection
from engine_adapter.embedded.dispatch import GROUP_ROWS, group_by_slot, least_rows
from engine_adapter.embedded.moe import GroupedMatrices, SparseBlock
from fleet.experts import ModelShape
from tests.engine_adapter.layer_forms import FORMS, KINDS, TORCH, computed_by

RANKS, EXPERTS = 2, 4
POOL = 24
"""different rows of which batches consist"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Batch(NamedTuple):
    """Shape of a part, and the rows that each expert gets."""

    hidden: int
    width: int
    dtype: str
    counts: tuple[int, ...]
    seed: int


def _batches() -> st.SearchStrategy[Batch]:
    drawn = st.builds(
        Batch,
        st.integers(4, 64).map(lambda eighth: 8 * eighth),
        st.integers(2, 64).map(lambda fourth: 4 * fourth),
        st.sampled_from(sorted(DTYPES)),
        st.tuples(*[st.one_of(st.integers(0, 12), st.integers(0, 300))] * EXPERTS),
        st.integers(0, 2**31),
    )
    return drawn.filter(lambda one: any(one.counts) and not unshardable(_shape(one), RANKS))


def _shape(batch: Batch) -> ModelShape:
    return ModelShape(
        layers=1,
        experts=EXPERTS,
        top_k=1,
        hidden=batch.hidden,
        expert_intermediate=batch.width * RANKS,
        dtype=batch.dtype,
    )


def _cancelling(rows: int, values: int, outputs: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Rows [rows, values] and a matrix for each expert [values, outputs] whose products cancel out, term by
    term: what is left shows the order of the sums, in which no two kernels agree."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(values, generator=generator)
    one, other = order[: values // 2], order[values // 2 :]
    found = torch.randn(rows, values, generator=generator).to(dtype)
    found[:, other] = found[:, one]
    matrices = []
    for _ in range(EXPERTS):
        matrix = torch.randn(values, outputs, generator=generator).to(dtype)
        matrix[other] = -matrix[one]
        matrices.append(matrix)
    return [found, *matrices]


def _places(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The expert of each row of a batch, and its row of the pool: int [rows] each."""
    random = np.random.default_rng(batch.seed)
    experts = random.permutation(np.repeat(np.arange(EXPERTS), batch.counts))
    return experts, random.integers(0, POOL, len(experts))


def _product(
    matrices: GroupedMatrices | SparseBlock,
    pool: torch.Tensor,
    experts: np.ndarray,
    which: np.ndarray,
    least: int,
) -> torch.Tensor:
    """Results of pairs of a pool's row and an expert, in their order, grouped as ranks group them."""
    groups = group_by_slot(experts, EXPERTS, least)
    rows, ends = pool[torch.from_numpy(which[groups.pair_of_row])], torch.from_numpy(groups.ends)
    found = (
        matrices.compute(rows, ends) if isinstance(matrices, SparseBlock) else matrices.product(rows, ends)
    )
    return found[torch.from_numpy(groups.row_of_pair)]


def _assert_same_bits(batch: Batch, matrices: GroupedMatrices | SparseBlock, pool: torch.Tensor) -> None:
    least = least_rows(DTYPES[batch.dtype], batch.hidden * batch.width)
    experts, which = _places(batch)
    together = _product(matrices, pool, experts, which, least)
    for at in np.unique(experts * POOL + which, return_index=True)[1].tolist():
        alone = _product(matrices, pool, experts[at : at + 1], which[at : at + 1], least)
        same = (experts == experts[at]) & (which == which[at])
        assert torch.equal(together[torch.from_numpy(same)], alone.expand(int(same.sum()), -1))


def check(batch: Batch) -> None:
    torch.set_num_threads(1)
    dtype = DTYPES[batch.dtype]
    arena = Arena(_shape(batch), EXPERTS // RANKS, ranks=RANKS)
    places = [divmod(expert, RANKS) for expert in range(EXPERTS)]
    gate_up = [arena.part_gate_up(cell, piece) for cell, piece in places]
    down = [arena.part_down(cell, piece) for cell, piece in places]
    products = (
        (
            GroupedMatrices([one.t() for one in gate_up]),
            [one.t() for one in gate_up],
            batch.hidden,
            2 * batch.width,
        ),
        (GroupedMatrices(down), down, batch.width, batch.hidden),
    )
    for grouped, views, values, outputs in products:
        pool, *matrices = _cancelling(POOL, values, outputs, dtype, batch.seed)
        for view, matrix in zip(views, matrices, strict=True):
            view.copy_(matrix)
        _assert_same_bits(batch, grouped, pool)
    block = SparseBlock(
        layer=0,
        gate=torch.empty(0),
        gate_up=products[0][0],
        down=products[1][0],
        top_k=1,
        normalise=True,
        sharded=True,
    )
    generator = torch.Generator().manual_seed(batch.seed)
    for view in (*gate_up, *down):
        view.copy_(torch.randn(view.shape, generator=generator) / 4)
    _assert_same_bits(batch, block, torch.randn(POOL, batch.hidden, generator=generator).to(dtype))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)
@given(batch=_batches())
@example(batch=Batch(32, 8, "bfloat16", (1, 3, 17, 40), 1))
@example(batch=Batch(128, 8, "bfloat16", (1, 4, 5, 300), 2))
@example(batch=Batch(96, 20, "float32", (1, 4, 33, 300), 3))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: str, batch: Batch) -> None:
    with computed_by(form):
        check(batch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=500)
@given(batch=_batches())
def test_a_row_has_the_same_bits_alone_and_in_any_batch_of_many(form: str, batch: Batch) -> None:
    with computed_by(form):
        check(batch)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(
    ranks=st.sampled_from([2, 4, 8]),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 32, 128]),
    hidden=st.integers(4, 64).map(lambda eighth: 8 * eighth),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_with_a_ranks_part_of_attention(
    form: str, ranks: int, heads: int, head_dim: int, hidden: int, dtype: str, seed: int
) -> None:
    """Products with some of the rows of a matrix, and with some of its columns."""
    with computed_by(form):
        check_projections(ranks, heads, head_dim, hidden, dtype, seed)


def check_projections(ranks: int, heads: int, head_dim: int, hidden: int, dtype: str, seed: int) -> None:
    torch.set_num_threads(1)
    width, random = heads * head_dim, np.random.default_rng(seed)
    rank = int(random.integers(ranks))
    taken = slice(rank * width, (rank + 1) * width)
    least = least_rows(DTYPES[dtype], hidden * head_dim)
    into = torch.randn(ranks * width, hidden).to(DTYPES[dtype])[taken]
    out = torch.randn(hidden, ranks * width).to(DTYPES[dtype])[:, taken]
    for part in (into, out):
        pool, matrix, *_ = _cancelling(POOL, part.shape[1], len(part), DTYPES[dtype], seed)
        part.copy_(matrix.t())
        projection = Projection(part, None)
        alone = torch.stack([projection.product(row.expand(least, -1))[0] for row in pool])
        for count in (least, least + 1, 33, 300):
            which = torch.from_numpy(random.integers(0, POOL, count))
            assert torch.equal(projection.product(pool[which]), alone[which])


def test_by_torch_groups_of_four_rows_suffice_but_for_tiny_matrices_of_short_numbers() -> None:
    with computed_by(TORCH):
        assert least_rows(torch.float32, 64) == GROUP_ROWS
    assert least_rows(torch.bfloat16, 1025) == GROUP_ROWS
    assert [least_rows(torch.bfloat16, values) for values in (1024, 256)] == [5, 17]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loops_need_no_padding(kind: str) -> None:
    with computed_by(kind):
        assert least_rows(torch.float32, 64) == 1
        assert least_rows(torch.bfloat16, 1025) == GROUP_ROWS


def test_without_more_rows_tiny_matrices_of_short_numbers_would_show_the_batch() -> None:
    """The reason for `least_rows`: torch computes more than 16 x 16 x 16 multiplications by another kernel."""
    torch.set_num_threads(1)
    pool, matrix, *_ = _cancelling(POOL, 32, 32, torch.bfloat16, 5)
    few = torch.cat([pool[at : at + GROUP_ROWS] @ matrix for at in range(0, POOL, GROUP_ROWS)])
    assert not torch.equal(few, pool @ matrix)
