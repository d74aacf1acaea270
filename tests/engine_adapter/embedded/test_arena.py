"""The arena: equal cells in one mapping, each seen through views and bytes that are the same memory, also
from elsewhere."""

import mmap
import os
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_adapter.embedded.arena import Arena, load_arena
from engine_adapter.embedded.checkpoint import Checkpoint, ExpertWeights
from engine_adapter.transfer.parts import CellFormat
from fleet.experts import ModelShape
from fleet.placement import Placement, linear, with_rows

write_tiny = runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"]
SHAPE = ModelShape(layers=3, experts=4, top_k=2, hidden=8, expert_intermediate=5)


def random_expert(shape):
    width, hidden = shape.expert_intermediate, shape.hidden
    return ExpertWeights(torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_expert_is_seen_through_every_view_without_a_copy(dtype):
    shape = ModelShape(layers=3, experts=4, top_k=2, hidden=8, expert_intermediate=5, dtype=dtype)
    arena = Arena(shape, slots=4)
    expert = random_expert(shape)
    arena.load_expert(6, expert)
    gate_up, down = arena.gate_up(6), arena.down(6)
    assert torch.equal(gate_up, torch.cat([expert.gate, expert.up]).to(gate_up.dtype))
    assert torch.equal(down, expert.down.t().to(down.dtype))
    assert gate_up.data_ptr() == arena.base + 6 * arena.cell_bytes == arena.cell(6).ctypes.data
    assert down.data_ptr() == gate_up.data_ptr() + 2 * shape.expert_bytes // 3
    assert arena.nbytes == 16 * arena.cell_bytes


@pytest.mark.parametrize("ballast", [0, 1, 100])
def test_tensors_lie_in_a_cell_one_behind_another_and_cells_begin_at_even_addresses(ballast):
    arena = Arena(SHAPE, slots=4, ballast_bytes=ballast)
    expert = random_expert(SHAPE)
    arena.load_expert(7, expert)
    arena.load_ballast(7, 1, 3)
    assert arena.base % 64 == arena.cell_bytes % 64 == 0
    end = 0
    for tensor, weights in zip(arena.tensors, (expert.gate, expert.up, expert.down.t()), strict=False):
        assert (tensor.dtype, tensor.offset, tensor.bytes) == ("float32", end, 4 * 5 * 8)
        memory = (
            arena.cell(7)[tensor.offset : tensor.offset + tensor.bytes].view(np.float32).reshape(tensor.shape)
        )
        assert np.array_equal(memory, weights.numpy())
        end += tensor.bytes
    assert [tensor.name for tensor in arena.tensors] == ["gate", "up", "down"] + ["ballast"] * (ballast > 0)
    assert end + ballast <= arena.cell_bytes < end + ballast + 64


def test_ballast_differs_from_expert_to_expert_and_not_from_rank_to_rank():
    first, second = Arena(SHAPE, slots=1, ballast_bytes=64), Arena(SHAPE, slots=1, ballast_bytes=64)
    for arena, experts in ((first, [(0, 0), (0, 1), (1, 0)]), (second, [(1, 0), (0, 0), (0, 1)])):
        for cell, (layer, expert) in enumerate(experts):
            arena.load_ballast(cell, layer, expert)
    seen = [bytes(first.cell(cell)) for cell in range(3)]
    assert len(set(seen)) == 3
    assert [bytes(second.cell(cell)) for cell in (1, 2, 0)] == seen


def test_cells_do_not_overlap_and_there_is_a_layer_of_them_beyond_those_of_the_slots():
    arena = Arena(SHAPE, slots=4)
    assert (arena.cells, arena.first_cells().tolist()) == (16, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    for cell in range(16):
        arena.cell(cell)[:] = cell
    for cell in range(16):
        assert (arena.cell(cell) == cell).all()
    for cell in (-1, 16):
        with pytest.raises(IndexError, match="cells 0 to 15"):
            arena.cell(cell)


def test_a_cell_has_room_for_the_parts_of_as_many_experts_as_there_are_ranks():
    shape = ModelShape(layers=3, experts=4, top_k=2, hidden=16, expert_intermediate=6)
    arena = Arena(shape, slots=4, ranks=2, spare_layers=2)
    assert (arena.parts, arena.cells) == (2, 5 * 4)
    assert arena.cell_bytes == shape.expert_bytes
    expert = random_expert(shape)
    arena.load_expert(6, expert)
    form = CellFormat.of(arena)
    for one in form.pulls(6, 1, 17, 0, sharded=True):
        arena.cell(17)[one.offset : one.offset + one.bytes] = arena.cell(6)[
            one.source_offset : one.source_offset + one.bytes
        ]
    part = arena.cell(17)[: 3 * 3 * 16 * 4].view(np.float32).reshape(3, 3, 16)
    assert np.array_equal(part, np.stack([expert.gate[3:], expert.up[3:], expert.down.t()[3:]]))


@pytest.mark.parametrize(
    ("shape", "ballast"),
    [
        (ModelShape(layers=1, experts=4, top_k=2, hidden=16, expert_intermediate=5), 0),
        (ModelShape(layers=1, experts=4, top_k=2, hidden=16, expert_intermediate=6), 3),
    ],
)
def test_experts_that_do_not_divide_are_one_part(shape, ballast):
    arena = Arena(shape, slots=4, ballast_bytes=ballast, ranks=2)
    assert arena.parts == 1


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory files")
def test_others_map_the_same_memory_through_its_descriptor_until_the_arena_is_gone():
    arena = Arena(SHAPE, slots=4)
    with (
        open(f"/proc/{os.getpid()}/fd/{arena.descriptor}", "r+b") as file,
        mmap.mmap(file.fileno(), arena.nbytes) as elsewhere,
    ):
        elsewhere[5 * arena.cell_bytes] = 77
        assert arena.cell(5)[0] == 77
        arena.cell(0)[3] = 66
        assert elsewhere[3] == 66
    descriptor = arena.descriptor
    del arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memory files")
def test_the_size_of_the_memory_is_sealed():
    arena = Arena(SHAPE, slots=4)
    for size in (0, 2 * arena.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)


def test_where_there_are_no_memory_files_the_arena_is_plain_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    arena = Arena(SHAPE, slots=4)
    assert arena.descriptor == -1
    assert arena.base % 64 == 0
    arena.load_expert(3, random_expert(SHAPE))
    assert arena.cell(3)[: SHAPE.expert_bytes].any()


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 1, "ballast_bytes": -1}, {"slots": 1, "spare_layers": 0}]
)
def test_a_rank_needs_slots(wrong):
    with pytest.raises(ValueError, match="at least 1 slot"):
        Arena(SHAPE, **wrong)


class Watched(Checkpoint):
    """Remembers which experts were read."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read = []

    def expert(self, layer, expert, dtype):
        self.read.append((layer, expert))
        return super().expert(layer, expert, dtype)


def test_a_rank_reads_its_own_experts_only(tmp_path):
    write_tiny(tmp_path)
    slots = np.array([[4, -1, 0, 2, 5, 1, 3, 0], [1, 3, -1, 5, 0, 2, 4, -1]])
    placement = Placement(slots, experts=6, ranks=2)
    with Watched(tmp_path) as checkpoint:
        arena = load_arena(checkpoint, placement, 0, "float32")
        assert sorted(checkpoint.read) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5)]
        assert torch.equal(arena.down(7), checkpoint.expert(1, 5, torch.float32).down.t())
    assert not arena.cell(1).any()
    assert not any(arena.cell(cell).any() for cell in range(8, 12))


def test_a_rank_holds_its_part_of_every_expert_of_a_sharded_layer(tmp_path):
    write_tiny(tmp_path, moe_intermediate_size=12)
    placement = with_rows(linear(layers=2, experts=6, ranks=2), {1: None}, epoch=3)
    with Checkpoint(tmp_path) as checkpoint:
        for rank in range(2):
            arena = load_arena(checkpoint, placement, rank, "float32", ballast_bytes=100)
            mine = slice(6 * rank, 6 * rank + 6)
            for expert in range(6):
                weights = checkpoint.expert(1, expert, torch.float32)
                cell, piece = 3 + expert // 2, expert % 2
                gate_up = torch.cat([weights.gate[mine], weights.up[mine]])
                assert torch.equal(arena.part_gate_up(cell, piece), gate_up)
                assert torch.equal(arena.part_down(cell, piece), weights.down[:, mine].t())
                assert arena.part_gate_up(cell, piece).data_ptr() % 64 == 0
            whole = checkpoint.expert(0, 3 * rank + 1, torch.float32)
            assert torch.equal(arena.down(1), whole.down.t())
            assert not any(arena.cell(cell).any() for cell in range(6, 9))


def test_the_ballast_of_a_part_is_its_share_of_the_experts_ballast(tmp_path):
    write_tiny(tmp_path, moe_intermediate_size=12)
    whole = linear(layers=2, experts=6, ranks=2)
    with Checkpoint(tmp_path) as checkpoint:
        arenas = [
            [load_arena(checkpoint, placement, rank, "float32", ballast_bytes=100) for rank in range(2)]
            for placement in (whole, with_rows(whole, {1: None}, epoch=3))
        ]
    for expert in range(6):
        ballast = arenas[0][expert // 3].tensors[-1]
        home = arenas[0][expert // 3].cell(3 + expert % 3)
        parts = []
        for arena in arenas[1]:
            begin, size = arena.format.ranges(expert % 2, sharded=True)[-1]
            parts.append(arena.cell(3 + expert // 2)[begin : begin + size])
        assert np.array_equal(np.concatenate(parts), home[ballast.offset : ballast.offset + 100])


def test_sharded_layers_of_experts_that_cannot_be_cut_are_refused(tmp_path):
    write_tiny(tmp_path, moe_intermediate_size=12)
    placement = with_rows(linear(layers=2, experts=6, ranks=2), {1: None}, epoch=3)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match="the 3 bytes of ballast"):
        load_arena(checkpoint, placement, 0, "float32", ballast_bytes=3)


def test_the_placement_of_another_model_is_refused(tmp_path):
    write_tiny(tmp_path)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match="does not fit a model of 2 layers x 6 experts"),
    ):
        load_arena(checkpoint, linear(layers=2, experts=8, ranks=1), 0, "float32")
