"""Placement: invariants are checked at construction, and epoch 0 is linear."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.experts import ExpertId, ModelShape
from fleet.layout import DP_ATTENTION, EP, TP_ATTENTION, TP_EP, AttentionLayout, Layout, tp
from fleet.placement import (
    EMPTY,
    FULL,
    Placement,
    PlacementRecord,
    as_stated,
    linear,
    with_attention,
    with_rows,
    with_slots,
)
from tests.fleet.splits import random_split, random_table


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Return a valid placement with random order, replicas and empty slots."""
    layers, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = random_table(rng, layers, ranks, experts, spare=draw(st.integers(0, 3)))
    return Placement(table, experts=experts, ranks=ranks, epoch=draw(st.integers(0, 1000)))


@given(placements())
@settings(max_examples=30)
def test_a_placement_survives_the_wire(placement: Placement) -> None:
    again = Placement.from_record(placement.record())
    assert again == placement
    assert again.even


def with_split(placement: Placement, seed: int) -> Placement:
    split = random_split(np.random.default_rng(seed), placement.expert_of_slot, placement.experts, nodes=True)
    return Placement(
        placement.expert_of_slot,
        experts=placement.experts,
        ranks=placement.ranks,
        epoch=placement.epoch,
        split=split,
    )


@given(placements(), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_any_legal_split_survives_the_wire(even: Placement, seed: int) -> None:
    placement = with_split(even, seed)
    again = Placement.from_record(
        msgspec.msgpack.decode(msgspec.msgpack.encode(placement.record()), type=PlacementRecord)
    )
    assert again == placement
    assert (
        (again == even) == placement.serves_as(even) == all(map(np.array_equal, placement.split, even.split))
    )
    assert placement.keeps_all == (placement.split.keep[even.expert_of_slot != EMPTY] == FULL).all()


@given(placements())
@settings(max_examples=30)
def test_the_even_split_keeps_what_is_its_own_and_shares_the_rest_to_within_one_part(
    placement: Placement,
) -> None:
    held = placement.expert_of_slot != EMPTY
    assert placement.keeps_all
    assert not placement.split.near.any()
    assert not placement.split.keep[~held].any()
    assert not placement.split.spill[~held].any()
    for layer, expert in np.ndindex(placement.layers, placement.experts):
        spill = placement.split.spill[layer, placement.expert_of_slot[layer] == expert].astype(int)
        assert spill.sum() == FULL
        assert sorted(spill, reverse=True) == spill.tolist()
        assert spill[0] - spill[-1] <= 1


HALVES = Placement(np.array([[0, 1, -1, 0, 1, -1]]), experts=2, ranks=2, epoch=3)


@pytest.mark.parametrize(
    ("part", "slot", "value", "message"),
    [
        ("spill", 0, 5, "spills of expert 0/0 add up to 32772; they must be 65535"),
        ("spill", 4, 0, "spills of expert 0/1 add up to 32768"),
        ("spill", 2, 9, "layer 0 slot 2 is empty but has spill 9; it must be 0"),
        ("keep", 5, FULL, "layer 0 slot 5 is empty but has keep 65535"),
        ("near", 2, 1, "layer 0 slot 2 is empty but has near 1"),
    ],
)
def test_an_illegal_split_is_refused_and_the_offender_named(
    part: str, slot: int, value: int, message: str
) -> None:
    wrong = HALVES.split._replace(**{part: getattr(HALVES.split, part).copy()})
    getattr(wrong, part)[0, slot] = value
    with pytest.raises(ValueError, match=message):
        Placement(HALVES.expert_of_slot, experts=2, ranks=2, split=wrong)
    sent = msgspec.structs.replace(
        HALVES.record(), **{name: each.astype("<u2").tobytes() for name, each in wrong._asdict().items()}
    )
    with pytest.raises(ValueError, match=message):
        Placement.from_record(sent)


@pytest.mark.parametrize(
    ("keep", "spill", "near", "named"),
    [(12, 12, 11, "11 bytes of near"), (0, 12, 12, "0 bytes of keep"), (12, 24, 12, "24 bytes of spill")],
)
def test_a_split_of_the_wrong_length_is_refused(keep: int, spill: int, near: int, named: str) -> None:
    record = msgspec.structs.replace(HALVES.record(), keep=bytes(keep), spill=bytes(spill), near=bytes(near))
    with pytest.raises(ValueError, match=named):
        Placement.from_record(record)


@pytest.mark.parametrize(("shape", "dtype"), [((1, 5), np.uint16), ((2, 6), np.uint16), ((1, 6), np.int32)])
def test_a_split_of_another_shape_or_kind_is_refused(shape: tuple[int, int], dtype: type) -> None:
    with pytest.raises(ValueError, match=r"keep is .* expected uint16 \(1, 6\), one number per slot"):
        Placement(
            HALVES.expert_of_slot,
            experts=2,
            ranks=2,
            split=HALVES.split._replace(keep=np.zeros(shape, dtype)),
        )


def test_a_split_is_copied_and_cannot_be_changed() -> None:
    keep = HALVES.split.keep.copy()
    placement = Placement(HALVES.expert_of_slot, experts=2, ranks=2, split=HALVES.split._replace(keep=keep))
    keep[:] = 0
    assert placement.keeps_all
    with pytest.raises(ValueError, match="read-only"):
        placement.split.spill[0, 0] = 1


def test_placements_that_differ_in_their_split_alone_differ() -> None:
    other = Placement(
        HALVES.expert_of_slot,
        experts=2,
        ranks=2,
        epoch=3,
        split=HALVES.split._replace(near=HALVES.split.keep),
    )
    assert other != HALVES
    assert not other.serves_as(HALVES)
    later = Placement(HALVES.expert_of_slot, experts=2, ranks=2, epoch=4)
    assert later != HALVES
    assert later.serves_as(HALVES)


@given(placements())
def test_inverse_maps_agree_with_the_slots(placement: Placement) -> None:
    for layer in range(placement.layers):
        for expert in range(placement.experts):
            seen = {
                int(slot) // placement.slots_per_rank
                for slot in np.flatnonzero(placement.expert_of_slot[layer] == expert)
            }
            assert placement.holders(ExpertId(layer, expert)) == sorted(seen)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 8))
def test_linear_placement_is_contiguous_balanced_and_complete(layers: int, experts: int, ranks: int) -> None:
    placement = linear(layers=layers, experts=experts, ranks=ranks)
    held = [placement.on_rank(rank)[0] for rank in range(ranks)]
    sizes = [int((block != EMPTY).sum()) for block in held]
    assert [int(e) for block in held for e in block if e != EMPTY] == list(range(experts))
    assert max(sizes) - min(sizes) <= 1
    assert placement.epoch == 0


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 3, 4, 9]], "names expert 9"),
        ([[0, 1, 2, 3, 4, -2]], "names expert -2"),
        ([[0, 0, 1, 2, 3, 4]], "rank 0 holds expert 0/0 more than once"),
        ([[0, 1, 2, 3, 4, -1]], "expert 0/5 has no replica"),
        ([[0, 1, 2, 3, 4]], "with 2 ranks"),
    ],
)
def test_an_illegal_placement_is_refused_and_the_offender_named(slots: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), experts=6, ranks=2)


def test_truncated_wire_bytes_are_refused() -> None:
    record = linear(layers=2, experts=4, ranks=2).record()
    damaged = type(record)(
        **{**{f: getattr(record, f) for f in record.__struct_fields__}, "slots": record.slots[:-1]}
    )
    with pytest.raises(ValueError, match="bytes of slots"):
        Placement.from_record(damaged)


def test_a_placement_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        linear(layers=1, experts=2, ranks=1).expert_of_slot[0, 0] = 1


def test_a_reported_placement_may_hold_an_expert_twice_on_a_rank() -> None:
    table = np.array([[0, 1, 2, 2], [0, 1, 2, 0]])
    with pytest.raises(ValueError, match=r"rank 1 holds expert 0/2 more than once"):
        Placement(table, experts=3, ranks=2)
    reported = Placement(table, experts=3, ranks=2, duplicates=True)
    assert reported.duplicates
    assert reported.holders(ExpertId(0, 2)) == [1]
    assert reported.replicas_on_rank.max() == 1
    assert Placement.from_record(reported.record()) == reported


def test_a_placement_that_may_hold_an_expert_twice_and_does_not_is_as_any_other() -> None:
    table = np.array([[0, 1, 2, 0]])
    once = Placement(table, experts=3, ranks=2, duplicates=True)
    assert not once.duplicates
    assert once == Placement(table, experts=3, ranks=2)
    assert not once.record().duplicates


def test_a_rank_that_holds_an_expert_twice_keeps_its_tokens_once() -> None:
    reported = Placement(np.array([[0, 0, 1, 0]]), experts=2, ranks=2, duplicates=True)
    assert reported.split.keep.tolist() == [[FULL, 0, FULL, FULL]]
    assert reported.split.spill[0, [0, 1, 3]].tolist() == [FULL // 3] * 3


# Layouts

SHAPE = ModelShape(layers=3, experts=8, top_k=2, hidden=4, expert_intermediate=8)


def test_whole_experts_go_with_either_attention() -> None:
    for layout in (EP, TP_EP):
        layout.check(SHAPE, 2)
    assert EP.targets_are_ranks
    assert not TP_EP.targets_are_ranks


def test_tensor_parallel_attention_shards_the_experts_of_all_layers_or_of_none() -> None:
    tp(3).check(SHAPE, 2)
    for sharded in ((0, 1), (2,)):
        with pytest.raises(ValueError, match=rf"or of none; not of {len(sharded)} of 3"):
            Layout(attention="tp", sharded=sharded).check(SHAPE, 2)


@given(st.sets(st.integers(0, 2)))
def test_with_data_parallel_attention_any_layers_may_be_sharded(sharded: set[int]) -> None:
    layout = Layout(attention="dp", sharded=tuple(sorted(sharded)))
    layout.check(SHAPE, 2)
    assert set(layout.whole(3).tolist()) == {0, 1, 2} - sharded
    assert layout.has_whole(3) == (len(sharded) < 3)


def test_a_sharded_layer_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="sharded layer 3 is not one of the model's 3 MoE layers"):
        Layout(attention="dp", sharded=(3,)).check(SHAPE, 2)


@pytest.mark.parametrize("sharded", [[1, 0], [1, 1], [-1]])
def test_sharded_layers_are_ascending_and_named_once(sharded: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Layout("dp", tuple(sharded))


def test_a_record_of_an_earlier_release_is_read_if_its_boundary_is_0() -> None:
    def read(**record: object) -> AttentionLayout:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=AttentionLayout)

    assert read(attention="dp", boundary=0) == DP_ATTENTION
    assert read(attention="tp", boundary=0) == TP_ATTENTION
    with pytest.raises(msgspec.ValidationError, match="boundary"):
        read(attention="dp", boundary=3)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (EP, "dp, experts whole"),
        (tp(3), "tp, layers 0-2 sharded"),
        (Layout(attention="dp", sharded=(0, 1, 5, 7, 8)), "dp, layers 0-1, 5, 7-8 sharded"),
    ],
)
def test_a_layout_reads_as_attention_and_sharded_layers(layout: Layout, text: str) -> None:
    assert str(layout) == text


def test_a_sharded_layer_names_no_expert_and_is_part_of_equality_hash_digest_and_record() -> None:
    whole = linear(layers=2, experts=4, ranks=2)
    sharded = with_rows(whole, {0: None}, epoch=0)
    assert (sharded.expert_of_slot[0] == EMPTY).all()
    assert not any(part[0].any() for part in sharded.split)
    assert sharded.whole.tolist() == [1]
    assert Placement.from_record(sharded.record()) == sharded
    assert sharded != whole
    assert not sharded.serves_as(whole)
    assert len({hash(sharded), hash(whole)}) == len({sharded.digest, whole.digest}) == 2
    assert with_rows(sharded, {0: whole.expert_of_slot[0]}, epoch=0) == whole


@given(placements())
@settings(max_examples=30)
def test_attention_is_part_of_equality_hash_digest_and_record(dp: Placement) -> None:
    tp_ = with_attention(dp, "tp", epoch=dp.epoch)
    assert tp_ != dp
    assert not tp_.serves_as(dp)
    assert len({tp_, dp}) == len({tp_.digest, dp.digest}) == 2
    wire = msgspec.msgpack.encode(tp_.record())
    assert Placement.from_record(msgspec.msgpack.decode(wire, type=PlacementRecord)) == tp_
    assert with_attention(tp_, "dp", epoch=dp.epoch) == dp


def test_attention_stays_as_slots_are_added_and_rows_change() -> None:
    tp_ = with_attention(linear(layers=2, experts=4, ranks=2), "tp", epoch=1)
    row = tp_.expert_of_slot[0][::-1]
    assert with_slots(tp_, 3).attention == with_rows(tp_, {0: row}, epoch=2).attention == "tp"
    assert "tensor-parallel" in repr(tp_)


def test_tensor_parallel_attention_goes_with_no_placement_that_shards_some_layers() -> None:
    whole = linear(layers=2, experts=4, ranks=2)
    every = with_rows(whole, {0: None, 1: None}, epoch=0)
    assert with_attention(every, "tp", epoch=1).layout == tp(2)
    with pytest.raises(ValueError, match="or of none; not of 1 of 2"):
        with_attention(with_rows(whole, {0: None}, epoch=0), "tp", epoch=1)


def test_with_data_parallel_attention_record_and_digest_are_those_of_earlier_releases() -> None:
    placement = with_rows(linear(layers=2, experts=4, ranks=2), {0: None}, epoch=3)
    assert b"attention" not in msgspec.msgpack.encode(placement.record())
    assert placement.digest == 4_235_220_523_558_746_297


def test_an_event_that_states_attention_beside_its_placement_counts() -> None:
    dp = linear(layers=2, experts=4, ranks=2).record()
    tp_ = as_stated(dp, TP_ATTENTION)
    assert (as_stated(dp, DP_ATTENTION), tp_.attention) == (dp, "tp")
    assert as_stated(tp_, TP_ATTENTION) == tp_


@pytest.mark.parametrize(
    ("sharded", "message"),
    [
        ((2,), "sharded layer 2; its 2 layers"),
        ((1, 0), r"ascending, each once; not \[1, 0\]"),
        ((0, 0), "ascending"),
        ((-1,), "numbers from 0 on"),
        ((1,), "layer 1 is sharded, but its slot 0 names expert 0"),
    ],
)
def test_illegal_sharded_layers_are_refused_and_named(sharded: tuple[int, ...], message: str) -> None:
    record = msgspec.structs.replace(linear(layers=2, experts=4, ranks=2).record(), sharded=sharded)
    with pytest.raises(ValueError, match=message):
        Placement.from_record(record)


def test_an_empty_layer_that_is_not_sharded_is_refused() -> None:
    record = with_rows(linear(layers=2, experts=4, ranks=2), {0: None}, epoch=0).record()
    with pytest.raises(ValueError, match="expert 0/0 has no replica"):
        Placement.from_record(msgspec.structs.replace(record, sharded=()))


def test_a_split_of_a_sharded_layer_must_be_0() -> None:
    sharded = with_rows(HALVES, {0: None}, epoch=0)
    wrong = HALVES.split
    with pytest.raises(ValueError, match="layer 0 slot 0 is empty but has keep"):
        Placement(
            sharded.expert_of_slot,
            experts=sharded.experts,
            ranks=sharded.ranks,
            split=wrong,
            sharded=sharded.sharded,
        )
