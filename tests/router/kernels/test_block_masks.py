"""The compiled masks of blocks hold, share and forget what their Python form does."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import kernels
from router.prefix_index.block_masks import MasksInPython

BLOCKS = st.lists(st.integers(0, 60) | st.integers(0, 2**64 - 1), max_size=25)
SLOTS = [0, 1, 5, 62, 63, 64, 200]
CHANGES = st.tuples(st.sampled_from(["grant", "withdraw"]), BLOCKS, st.sampled_from(SLOTS))


def _compiled(salt: int) -> kernels.BlockMasks:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    return library.BlockMasks(salt)


class Side:
    """Masks in one form, and others of this form that are swept into them."""

    def __init__(self, masks: Any, old: Any) -> None:
        self.masks, self.old, self.shared, self.live = masks, old, dict[int, int](), (1 << 201) - 1

    def change(self, kind: str, blocks: list[int], bit: int) -> object:
        if kind == "grant":
            return self.masks.grant(blocks, bit, self.old, self.live, self.shared)
        return self.masks.withdraw(blocks, bit, self.old, self.shared)

    def begin_sweep(self, stale: int) -> None:
        self.masks, self.old, self.live = self.old, self.masks, self.live ^ stale

    def sweep(self, count: int) -> list[int]:
        gone: list[int] = self.old.sweep(count, self.live, self.masks, self.shared)
        return gone

    def content(self, blocks: set[int]) -> list[int]:
        return [self.masks.get(one) or (self.old.get(one) or 0) & self.live for one in sorted(blocks)]


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([0, 1, 2**63 + 12345, kernels.SALT]),
    st.lists(CHANGES, max_size=30),
    st.sets(st.sampled_from(SLOTS)),
    st.lists(st.one_of(CHANGES, st.integers(0, 20)), max_size=30),
)
def test_both_forms_hold_the_same_before_and_during_a_sweep(
    salt: int, first: list[Any], stale: set[int], then: list[Any]
) -> None:
    """The order in which blocks are swept is free, and shows in nothing."""
    compiled, python = Side(_compiled(salt), _compiled(salt)), Side(MasksInPython(), MasksInPython())
    named: set[int] = set()
    for kind, blocks, slot in first:
        named.update(blocks)
        assert compiled.change(kind, blocks, 1 << slot) == python.change(kind, blocks, 1 << slot)
        assert compiled.content(named) == python.content(named)
        assert len(compiled.masks) == len(python.masks)
    for side in (compiled, python):
        side.begin_sweep(sum(1 << slot for slot in stale))
    for step in then:
        if isinstance(step, int):
            compiled.sweep(step)
            python.sweep(step)
        elif step[2] not in stale:
            kind, blocks, slot = step
            named.update(blocks)
            assert compiled.change(kind, blocks, 1 << slot) == python.change(kind, blocks, 1 << slot)
        assert compiled.content(named) == python.content(named)
    for side in (compiled, python):
        side.sweep(10_000)
        assert len(side.old) == 0
    assert compiled.content(named) == python.content(named)
    assert len(compiled.masks) == len(python.masks) == len([one for one in compiled.content(named) if one])
    assert all((block in compiled.masks) == bool(compiled.masks.get(block)) for block in named)


def test_a_sweep_returns_each_block_without_valid_holders_once() -> None:
    side, blocks = Side(_compiled(1), _compiled(1)), list(range(1000))
    side.change("grant", blocks, 1)
    side.change("grant", blocks[::3], 2)
    side.begin_sweep(1)
    gone: list[int] = []
    while side.old:
        gone += side.sweep(7)
    assert sorted(gone) == [block for block in blocks if block % 3]
    assert side.content(set(blocks)) == [0 if block % 3 else 2 for block in blocks]


def test_masks_that_are_half_swept_may_grow() -> None:
    side, blocks = Side(_compiled(1), _compiled(1)), list(range(300))
    side.change("grant", blocks, 1)
    side.begin_sweep(2)
    side.sweep(280)
    side.old.grant(range(1000, 2000), 4, _compiled(1), 7, {})
    while side.old:
        assert side.sweep(9) == []
    assert side.content({*blocks, *range(1000, 2000)}) == [1] * 300 + [4] * 1000


def test_a_hundred_thousand_blocks_come_and_go() -> None:
    masks, none, shared = _compiled(kernels.SALT), _compiled(1), dict[int, int]()
    blocks = [(at * 0x9E3779B97F4A7C15) % 2**64 for at in range(100_000)]
    assert masks.grant(blocks, 1, none, 3, shared) == len(blocks)
    assert masks.grant(blocks[::2], 2, none, 3, shared) == len(blocks) // 2
    assert masks.withdraw(blocks, 1, none, shared) == blocks
    assert len(masks) == len(blocks) // 2
    assert [masks.get(block) for block in blocks[:6]] == [2, None, 2, None, 2, None]
    assert masks.withdraw(blocks, 2, none, shared) == blocks[::2]
    assert len(masks) == 0


def test_numbers_that_no_block_has_are_nowhere_and_cannot_be_stored() -> None:
    masks, none, shared = _compiled(7), _compiled(7), dict[int, int]()
    for number in (-1, 1 << 64, 1 << 200):
        assert masks.get(number) is None
        assert number not in masks
        assert masks.withdraw([number], 1, none, shared) == []
        with pytest.raises(OverflowError):
            masks.grant([number], 1, none, 1, shared)
    with pytest.raises(TypeError):
        masks.get("block")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="masks are BlockMasks"):
        masks.grant([1], 1, {}, 1, shared)
    assert len(masks) == 0
