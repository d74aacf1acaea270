"""KV units: where attention finds them, and that only the content of a page matters to
what is computed, not the units it consists of."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from fleet.placement import linear

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model" / "checkpoint"
TEXT = list(Path(__file__).read_bytes())


def pool_of(pages=5, groups=2, layers=3, kv_heads=4, dtype=torch.float32) -> KvPool:
    return KvPool(
        pages=pages,
        groups=groups,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=8,
        page_tokens=16,
        dtype=dtype,
    )


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**32 - 1))
def test_the_rows_of_a_page_are_the_bytes_of_its_units(data, dtype, seed):
    groups, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    whole = data.draw(st.booleans())
    pool = pool_of(pages=4, groups=groups, kv_heads=groups * heads, dtype=dtype)
    values = torch.randn(pool.values.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for number in range(pool.units):
        pool.unit(number)[:] = values[number].view(torch.uint8).numpy().ravel()
    of_page = groups if whole else 1
    units = np.random.default_rng(seed).permutation(pool.units).astype(np.int32).reshape(-1, of_page)
    table = pool.page_table(units, of_page)
    for layer in range(3):
        for page, members in enumerate(units.tolist()):
            found = pool.layer(layer)[torch.from_numpy(table.rows[:, page])]
            keys = [values[unit, layer, head] for unit in members for head in range(heads)]
            both = [*keys, *(values[unit, layer, heads + head] for unit in members for head in range(heads))]
            assert torch.equal(found, torch.stack(both))


def test_another_mapping_of_the_descriptor_shows_the_units():
    pool = pool_of()
    pool.values.copy_(torch.arange(pool.values.numel()).view(pool.values.shape))
    with mmap.mmap(pool.descriptor, pool.nbytes, prot=mmap.PROT_READ) as mapping:
        found = np.frombuffer(mapping, np.uint8).reshape(pool.units, pool.unit_bytes).copy()
    assert all(np.array_equal(found[number], pool.unit(number)) for number in range(pool.units))
    assert pool.units == 10
    assert pool.page_bytes == 2 * pool.unit_bytes == 3 * 2 * 4 * 16 * 8 * 4


def test_a_unit_that_does_not_exist_is_refused():
    with pytest.raises(IndexError, match="unit 10; there are units 0 to 9"):
        pool_of().unit(10)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (np.zeros((2, 1), np.int32), r"int32 \(2, 1\); expected int32 \[pages, 2\]"),
        (np.zeros((0, 2), np.int32), r"int32 \(0, 2\)"),
        (np.array([[0, 1]]), "int64"),
        (np.array([[0, 1], [1, 2]], np.int32), "unit 1 in a page table; every page needs units of its own"),
        (np.array([[0, 10]], np.int32), "unit 10 in .* from 0 to 9"),
        (np.array([[-1, 0]], np.int32), "unit -1 in"),
    ],
)
def test_a_table_that_fits_no_pool_is_refused(units, message):
    with pytest.raises(ValueError, match=message):
        pool_of().page_table(units, 2)


def test_the_units_of_a_page_may_be_any_and_change_between_two_steps():
    with Checkpoint(DEMO) as checkpoint:
        placement = linear(layers=checkpoint.config.layers, experts=checkpoint.config.experts, ranks=1)
        runner = ModelRunner(checkpoint, placement, kv_pages=12)
    assert runner.kv_units.tolist() == [[page] for page in range(12)]
    assert not runner.kv_units.flags.writeable
    prompt, answer = TEXT[:70], TEXT[70:90]
    pages = [4, 0, 7, 1, 2, 9]

    def computed(pages, begin):
        step = [SequenceWork(answer[at : at + 1], 70 + at, pages, True) for at in range(begin, 20)]
        return torch.cat([runner.forward([one]).logits for one in step])

    runner.forward([SequenceWork(prompt, 0, pages, needs_logits=False)])
    known = computed(pages, 0)
    order = np.random.default_rng(5).permutation(12).astype(np.int32)
    held = runner.kv_pool.values.clone()
    runner.kv_pool.values[torch.from_numpy(order).long()] = held
    runner.adopt_kv(order[:, None])
    assert torch.equal(computed(pages, 10), known[10:])
    runner.adopt_kv(np.arange(12, dtype=np.int32)[::-1, None])
    assert torch.equal(computed([11 - int(order[page]) for page in pages], 10), known[10:])
