"""Placement registry: accepted, rejected and redundant events."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.facts.engines import EngineJoined
from fleet.facts.placements import PlacementCommitted
from fleet.layout import EP, TP_EP, AttentionLayout, Layout, tp
from fleet.placement import Placement, PlacementRecord, linear, with_attention, with_rows
from migration.engine_state.placement_registry import InvalidPlacementEvent, PlacementFault, PlacementRegistry
from tests.migration import builders
from tests.migration.builders import SHAPE

FIRST = linear(layers=2, experts=8, ranks=2, slots_per_rank=5)


def joined(
    worker_id: int = 1,
    engine: str = "a",
    placement: Placement | PlacementRecord | None = FIRST,
    **fields: Any,
) -> EngineJoined:
    return builders.joined(worker_id, engine, placement, **fields)


def later(epoch: int, shift: int = 0) -> Placement:
    """Return the first placement with its experts rotated, at a given epoch."""
    table = FIRST.expert_of_slot.copy()
    table[table >= 0] = (table[table >= 0] + shift) % 8
    return Placement(table, experts=8, ranks=2, epoch=epoch)


def committed(placement: Placement, worker_id: int = 1, engine: str = "a") -> PlacementCommitted:
    return PlacementCommitted(
        engine=engine,
        worker_id=worker_id,
        attention=AttentionLayout(kind=placement.attention),
        placement=placement.record(),
    )


def test_a_new_incarnation_asks_for_its_epoch_0_to_be_recorded_until_it_is() -> None:
    ledger = PlacementRegistry()
    wanted = ledger.joined(joined())
    assert wanted == committed(FIRST)
    assert ledger.joined(joined()) == wanted
    assert ledger.entry(1) is None
    assert ledger.committed(committed(FIRST))
    assert ledger.joined(joined()) is None
    entry = ledger.entry(1)
    assert entry is not None
    assert (entry.engine, entry.epoch, entry.placement, entry.layout) == ("a", 0, FIRST, EP)
    assert ledger.engines() == {"a": entry}


def test_a_restarted_engine_begins_again_at_epoch_0() -> None:
    ledger = PlacementRegistry()
    ledger.joined(joined(1))
    ledger.committed(committed(FIRST))
    ledger.committed(committed(later(1, 3)))
    assert ledger.joined(joined(2)) == committed(FIRST, 2)
    ledger.committed(committed(FIRST, 2))
    assert ledger.engines()["a"].worker_id == 2
    entry = ledger.entry(1)
    assert entry is not None
    assert entry.epoch == 1


def test_a_restarted_engine_may_go_on_with_the_epoch_of_its_life_before() -> None:
    ledger = PlacementRegistry()
    ledger.joined(joined(1))
    ledger.committed(committed(FIRST))
    ledger.committed(committed(later(3, 1)))
    assert ledger.joined(joined(2, placement=later(3, 1))) == committed(later(3, 1), 2)
    ledger.committed(committed(later(3, 1), 2))
    assert ledger.engines()["a"].epoch == 3
    assert ledger.joined(joined(2, placement=later(3, 1))) is None


def test_epochs_only_grow_and_repetitions_are_no_news() -> None:
    ledger = PlacementRegistry()
    news = [ledger.committed(committed(later(epoch, epoch))) for epoch in (0, 1, 1, 0, 2, 5, 2, 5)]
    assert news == [True, True, False, False, True, True, False, False]
    entry = ledger.entry(1)
    assert entry is not None
    assert entry.epoch == 5


def test_one_epoch_is_one_placement() -> None:
    ledger = PlacementRegistry()
    ledger.joined(joined())
    ledger.committed(committed(FIRST))
    for attempt in (
        lambda: ledger.committed(committed(later(0, 1))),
        lambda: ledger.joined(joined(placement=later(0, 1))),
    ):
        with pytest.raises(InvalidPlacementEvent) as refusal:
            attempt()
        assert refusal.value.fault is PlacementFault.CONTRADICTION
    entry = ledger.entry(1)
    assert entry is not None
    assert entry.placement == FIRST


def test_an_engine_that_rejoins_after_later_epochs_has_nothing_to_record() -> None:
    ledger = PlacementRegistry()
    ledger.joined(joined())
    for epoch in (0, 1, 2):
        ledger.committed(committed(later(epoch, epoch)))
    assert ledger.joined(joined()) is None
    assert ledger.engines()["a"].epoch == 2


def test_an_engine_that_says_nothing_of_experts_is_present_without_an_entry() -> None:
    ledger = PlacementRegistry()
    assert ledger.joined(joined(placement=None, shape=None, layout=None)) is None
    assert ledger.engines() == {}


def test_an_engine_that_left_is_present_no_more_but_can_be_read() -> None:
    ledger = PlacementRegistry()
    ledger.joined(joined())
    ledger.committed(committed(FIRST))
    ledger.left(1)
    ledger.left(77)
    assert ledger.engines() == {}
    assert ledger.entry(1) is not None


def test_a_tensor_parallel_engine_is_one_target_with_the_placement_to_return_to() -> None:
    layout = tp(2)
    wanted = PlacementRegistry().joined(joined(layout=layout, urls=("http://x",)))
    assert wanted is not None
    assert wanted.layout == layout


def test_a_tensor_parallel_engine_with_whole_experts_is_one_target_with_several_ranks() -> None:
    fields = {"layout": TP_EP, "urls": ("http://x",), "rearranges": True}
    wanted = PlacementRegistry().joined(joined(**fields))
    assert wanted is not None
    assert joined(**fields).expert_ranks == wanted.placement.ranks == 2


def test_an_engine_that_moves_its_experts_itself_may_have_several_ranks_behind_each_target() -> None:
    urls = ("http://x", "http://y")
    table = np.tile(np.arange(8), (2, 1))
    placement = Placement(table, experts=8, ranks=4).record()
    assert PlacementRegistry().joined(joined(urls=urls, placement=placement, rearranges=True)) is not None
    with pytest.raises(InvalidPlacementEvent, match="ranks"):
        PlacementRegistry().joined(joined(urls=urls, placement=placement))


def test_a_reported_map_with_an_expert_twice_on_a_rank_is_recorded() -> None:
    table = np.tile([*range(8), 4, 5], (2, 1))
    reported = Placement(table, experts=8, ranks=2, duplicates=True).record()
    wanted = PlacementRegistry().joined(joined(placement=reported, rearranges=True))
    assert wanted is not None
    assert Placement.from_record(wanted.placement).duplicates


def test_attention_that_an_earlier_release_stated_beside_a_placement_counts() -> None:
    ledger = PlacementRegistry()
    urls = {"urls": ("http://x",), "rearranges": True}
    stated = msgspec.structs.replace(joined(layout=TP_EP, **urls), placement=FIRST.record())
    wanted = ledger.joined(stated)
    assert wanted is not None
    assert (wanted.placement.attention, wanted.layout) == ("tp", TP_EP)
    old = msgspec.structs.replace(wanted, placement=FIRST.record())
    assert ledger.committed(old)
    assert ledger.engines()["a"].layout == TP_EP
    assert not ledger.committed(wanted), "the same epoch, as it is stated now"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"shape": None}, PlacementFault.SHAPE),
        ({"layout": None}, PlacementFault.SHAPE),
        ({"urls": ("http://x",)}, PlacementFault.SHAPE),
        ({"shape": msgspec.structs.replace(SHAPE, layers=3)}, PlacementFault.SHAPE),
        ({"shape": msgspec.structs.replace(SHAPE, experts=7)}, PlacementFault.SHAPE),
        ({"layout": Layout(attention="tp", sharded=(0,))}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), attention="tp")}, PlacementFault.LAYOUT),
        ({"placement": msgspec.structs.replace(FIRST.record(), sharded=(9,))}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), sharded=(1, 0))}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), slots=b"")}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), slots=b"\0" * 40)}, PlacementFault.PLACEMENT),
        (
            {"placement": msgspec.structs.replace(FIRST.record(), slots=b"\xff" * 40)},
            PlacementFault.PLACEMENT,
        ),
        ({"placement": msgspec.structs.replace(FIRST.record(), experts=9)}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), experts=1 << 40)}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), experts=-1)}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), ranks=0)}, PlacementFault.PLACEMENT),
        (
            {"placement": msgspec.structs.replace(FIRST.record(), ranks=-2, slots_per_rank=-5)},
            PlacementFault.PLACEMENT,
        ),
        ({"placement": msgspec.structs.replace(FIRST.record(), ranks=3)}, PlacementFault.PLACEMENT),
        ({"placement": msgspec.structs.replace(FIRST.record(), epoch=-1)}, PlacementFault.PLACEMENT),
    ],
)
def test_a_join_that_contradicts_itself_is_refused_and_asks_for_nothing(
    fields: dict[str, Any], fault: PlacementFault
) -> None:
    ledger = PlacementRegistry()
    with pytest.raises(InvalidPlacementEvent) as refusal:
        ledger.joined(joined(**fields))
    assert refusal.value.fault is fault
    assert ledger.entry(1) is None
    assert ledger.engines() == {}


def test_a_placement_of_another_shape_is_refused() -> None:
    ledger = PlacementRegistry()
    ledger.committed(committed(FIRST))
    with pytest.raises(InvalidPlacementEvent) as refusal:
        ledger.committed(committed(linear(layers=2, experts=8, ranks=4)))
    assert refusal.value.fault is PlacementFault.SHAPE
    with pytest.raises(InvalidPlacementEvent) as refusal:
        ledger.committed(
            msgspec.structs.replace(
                committed(FIRST), placement=msgspec.structs.replace(FIRST.record(), slots=b"12")
            )
        )
    assert refusal.value.fault is PlacementFault.PLACEMENT


def test_incarnations_long_gone_are_forgotten_and_present_ones_never() -> None:
    ledger = PlacementRegistry(max_incarnations=3)
    ledger.joined(joined(1, "stays"))
    ledger.committed(committed(FIRST, 1, "stays"))
    for worker_id in range(2, 10):
        ledger.committed(committed(FIRST, worker_id, "gone"))
    assert [worker_id for worker_id in range(1, 10) if ledger.entry(worker_id)] == [1, 8, 9]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 7)), max_size=40))
def test_however_the_log_is_repeated_or_mixed_the_newest_agreed_epoch_stands(
    said: list[tuple[int, int, int]],
) -> None:
    ledger = PlacementRegistry()
    expected: dict[int, tuple[int, int]] = {}
    for worker_id, epoch, shift in said:
        best = expected.get(worker_id)
        try:
            news = ledger.committed(committed(later(epoch, shift), worker_id))
        except InvalidPlacementEvent:
            assert best is not None
            assert best[0] == epoch
            assert best[1] != shift
            continue
        assert news == (best is None or epoch > best[0])
        if news:
            expected[worker_id] = (epoch, shift)
    for worker_id, (epoch, shift) in expected.items():
        entry = ledger.entry(worker_id)
        assert entry is not None
        np.testing.assert_array_equal(entry.placement.expert_of_slot, later(epoch, shift).expert_of_slot)


def test_an_epoch_whose_layers_turn_over_is_recorded_only_of_an_engine_that_can() -> None:
    after = with_rows(FIRST, {0: None}, epoch=1)
    for reason in ("", "its agent is old"):
        registry = PlacementRegistry()
        registry.joined(joined(unshardable=reason))
        registry.committed(committed(FIRST))
        if reason:
            with pytest.raises(InvalidPlacementEvent, match=r"form of layers \[0\], but its agent is old"):
                registry.committed(committed(after))
        else:
            assert registry.committed(committed(after))
            assert registry.engines()["a"].layout == Layout("dp", (0,))


def test_an_epoch_with_other_attention_is_recorded_only_of_an_engine_that_can_change_it() -> None:
    every = with_rows(FIRST, {0: None, 1: None}, epoch=1)
    after = with_attention(every, "tp", epoch=2)
    for reason in ("", "its heads do not divide"):
        registry = PlacementRegistry()
        registry.joined(joined(unshardable="", tp_refusal=reason))
        registry.committed(committed(FIRST))
        registry.committed(committed(every))
        assert registry.engines()["a"].targets == 2
        if reason:
            with pytest.raises(InvalidPlacementEvent, match="attention to tp, but its heads do not divide"):
                registry.committed(committed(after))
        else:
            assert registry.committed(committed(after))
            assert (registry.engines()["a"].layout, registry.engines()["a"].targets) == (tp(2), 1)
