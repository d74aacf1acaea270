"""Pure parts of the benchmark of switches: the copies of a turn, time beside the bytes, gaps."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.rig.engine_ranks import Carried, Window
from benchmarks.rig.turns.figures import Gaps, covered, excess, handed, least_steps
from benchmarks.rig.turns.part_reads import forms, part_reads
from benchmarks.switch import paced, rank_bytes
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.parts import CellFormat
from fleet.experts import ModelShape
from fleet.facts.migrations import MigrationCommitted

ROWS, HIDDEN, LAYERS = 8, 16, 2
TENSORS = laid_out(tuple((name, "<f4", (ROWS, HIDDEN)) for name in ("gate", "up", "down")))
Weights = NDArray[np.float32]


def weights(layer: int, expert: int) -> Weights:
    """float32 [3, ROWS, HIDDEN], unlike any other expert's."""
    return np.random.default_rng([layer, expert]).standard_normal((3, ROWS, HIDDEN), np.float32)


@pytest.mark.parametrize(("ranks", "experts"), [(2, 6), (4, 6), (4, 8)])
def test_the_copies_of_a_turn_bring_every_part_to_its_place_and_back(ranks: int, experts: int) -> None:
    engine = forms(layers=LAYERS, experts=experts, ranks=ranks)
    slots = engine.whole.slots_per_rank
    memories = [MappedCells(TENSORS, 2 * LAYERS * slots, ranks) for _ in range(ranks)]
    form = CellFormat.of(memories[0])
    held = [
        (rank, layer, slot, int(expert))
        for rank in range(ranks)
        for (layer, slot), expert in np.ndenumerate(engine.whole.on_rank(rank))
        if expert >= 0
    ]

    def whole(rank: int, layer: int, slot: int) -> NDArray[np.uint8]:
        return memories[rank].cell(layer * slots + slot)[: form.whole_bytes]

    def turn(to_sharded: bool) -> None:
        for rank, mine in enumerate(memories):
            for one in part_reads(engine, rank, to_sharded=to_sharded):
                read = one.read
                for source, at, cell, to, size in form.pulls(
                    read.source, read.source_piece, read.cell, read.piece, sharded=read.sharded
                ):
                    mine.cell(cell)[to : to + size] = memories[one.source].cell(source)[at : at + size]

    for rank, layer, slot, expert in held:
        whole(rank, layer, slot)[:] = weights(layer, expert).view(np.uint8).ravel()
    turn(True)
    part_rows, stride = ROWS // ranks, 3 * (ROWS // ranks) * HIDDEN * 4
    for rank, mine in enumerate(memories):
        for layer in range(LAYERS):
            for expert in range(experts):
                cell = mine.cell((LAYERS + layer) * slots + expert // ranks)
                piece = cell[expert % ranks * stride :][:stride].view(np.float32)
                expected = weights(layer, expert)[:, rank * part_rows : (rank + 1) * part_rows]
                assert (piece.reshape(expected.shape) == expected).all()
    for rank, layer, slot, _ in held:
        whole(rank, layer, slot)[:] = 0
    turn(False)
    for rank, layer, slot, expert in held:
        assert (whole(rank, layer, slot) == weights(layer, expert).view(np.uint8).ravel()).all()
    for one in memories:
        one.close()


def test_overlapping_intervals_are_covered_once_and_only_inside_the_window() -> None:
    begins, ends = np.array([5.0, 0.0, 1.0, 8.0, 2.0]), np.array([6.0, 2.0, 3.0, 20.0, 2.5])
    assert covered(begins, ends, Window(0.5, 10.0)) == pytest.approx(2.5 + 1.0 + 2.0)
    assert covered(np.zeros(0), np.zeros(0), Window(0.0, 1.0)) == 0.0


def committed(number: int, seconds: float) -> MigrationCommitted:
    return MigrationCommitted(
        engine="e", worker_id=1, plan="p", handover=number, number=number, epoch=number, copies=0, bytes=0,
        seconds=seconds, commit_seconds=0.0, last=number == 1,
    )  # fmt: skip


def diary(**fields: Any) -> dict[str, NDArray[Any]]:
    return {name: np.array(values) for name, values in fields.items()}


def test_time_beside_the_bytes_is_what_no_rank_spends_on_them() -> None:
    carried = Carried(10.0, (11.0, 13.0), (committed(0, 0.9), committed(1, 1.9)))
    one = diary(
        stage_name=["pull", "verify", "prepare", "pull"],
        stage_begin=[10.1, 10.3, 10.4, 11.5],
        stage_end=[10.3, 10.4, 10.9, 12.0],
    )
    other = diary(stage_name=["pull", "pull"], stage_begin=[10.2, 12.5], stage_end=[10.5, 12.75])
    found = handed(carried, [one, other])
    assert found.seconds == pytest.approx(3.0)
    assert found.beside == pytest.approx((1.0 - 0.4, 2.0 - 0.75))


def test_the_fewest_steps_are_those_of_the_rank_that_stood_still() -> None:
    carried = [Carried(10.0, (11.0, 13.0), (committed(0, 0.9), committed(1, 1.9)))]
    busy = diary(step=np.arange(10.0, 14.0, 0.25).tolist())
    assert least_steps([busy, diary(step=[10.05, 10.2, 10.4, 11.2, 12.9])], carried) == 2
    assert least_steps([busy, diary(step=[10.5, 13.5])], carried) == 0


def test_gaps_are_pooled_over_windows_and_ranks() -> None:
    ranks = [
        diary(token=[1.0, 2.0, 11.0], gap=[0.1, 0.2, 0.9]),
        diary(token=[1.5, 12.0], gap=[0.3, 0.5]),
    ]
    gaps = Gaps.of(ranks, {"early": [Window(0.0, 1.75), Window(1.75, 3.0)], "late": [Window(10.0, 13.0)]})
    assert sorted(gaps.pooled("early").tolist()) == [0.1, 0.2, 0.3]
    assert sorted(gaps.pooled("early", "late").tolist()) == [0.1, 0.2, 0.3, 0.5, 0.9]
    assert gaps.shares_above(0.25, "early", "late") == [0.5, 0.0, 1.0]


def test_an_excess_within_two_errors_is_none() -> None:
    same = excess([1.0, 3.0, 2.0], [1.5, 2.5, 1.0])
    assert same.more == pytest.approx(2.0 - 5 / 3)
    # variances 1 and 7/12, of three windows each
    assert same.error == pytest.approx((1 / 3 + 7 / 36) ** 0.5)
    assert same.beyond_two_errors < 0 < excess([5.0, 5.1, 4.9], [1.0, 1.1]).beyond_two_errors
    assert excess([1.0], [0.5]) == (0.5, 0.0)


def test_bytes_move_at_a_tenth_of_their_full_speed() -> None:
    shape = ModelShape(layers=4, experts=32, top_k=4, hidden=64, expert_intermediate=32)
    full = 0.05
    # Half of what a rank gets comes from the other rank, while it copies the other half itself.
    assert rank_bytes(shape) / 2 / paced(shape, full) == pytest.approx(10 * full, rel=1e-3)
