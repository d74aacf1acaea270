"""The arena: one allocation, whose slots, views and bytes are the same memory."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_adapter.embedded.arena import Arena, load_arena
from engine_adapter.embedded.checkpoint import Checkpoint, ExpertWeights
from fleet.experts import ModelShape
from fleet.placement import Placement, linear

write_tiny = runpy.run_path(str(Path(__file__).parent / "tiny_models.py"))["write_tiny"]
SHAPE = ModelShape(layers=3, experts=4, top_k=2, hidden=8, expert_intermediate=5)


def random_expert(shape):
    width, hidden = shape.expert_intermediate, shape.hidden
    return ExpertWeights(torch.randn(width, hidden), torch.randn(width, hidden), torch.randn(hidden, width))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_expert_is_seen_through_every_view_without_a_copy(dtype):
    shape = ModelShape(layers=3, experts=4, top_k=2, hidden=8, expert_intermediate=5, dtype=dtype)
    arena = Arena(shape, slots=4)
    expert = random_expert(shape)
    arena.load_expert(1, 2, expert)
    gate_up, down = arena.gate_up(1)[2], arena.down(1)[2]
    assert torch.equal(gate_up, torch.cat([expert.gate, expert.up]).to(gate_up.dtype))
    assert torch.equal(down, expert.down.t().to(down.dtype))
    start = arena.gate_up(0).data_ptr()
    per_layer = 4 * shape.expert_bytes
    assert gate_up.data_ptr() == start + per_layer + 2 * shape.expert_bytes
    assert down.data_ptr() == gate_up.data_ptr() + 2 * shape.expert_bytes // 3
    assert arena.nbytes == 4 * per_layer


def test_the_bytes_of_a_slot_are_its_weights():
    arena = Arena(SHAPE, slots=4)
    arena.load_expert(0, 1, random_expert(SHAPE))
    memory = arena.slot_bytes(2, 3)
    assert memory.shape == (SHAPE.expert_bytes,)
    assert memory.flags.c_contiguous
    memory[:] = arena.slot_bytes(0, 1)
    assert torch.equal(arena.gate_up(2)[3], arena.gate_up(0)[1])
    assert torch.equal(arena.down(2)[3], arena.down(0)[1])
    assert memory.ctypes.data == arena.gate_up(2)[3].data_ptr()


def test_slots_do_not_overlap():
    arena = Arena(SHAPE, slots=4)
    for layer in range(3):
        for slot in range(4):
            arena.slot_bytes(layer, slot)[:] = 1 + 4 * layer + slot
    for layer in range(3):
        for slot in range(4):
            assert (arena.slot_bytes(layer, slot) == 1 + 4 * layer + slot).all()
    assert not arena.hole.any()


def test_the_hole_is_one_more_layer_block_in_the_same_allocation():
    arena = Arena(SHAPE, slots=4)
    assert arena.hole.shape == (4, 15, 8)
    assert arena.hole.data_ptr() == arena.gate_up(2).data_ptr() + 4 * SHAPE.expert_bytes


def test_a_rank_needs_slots():
    with pytest.raises(ValueError, match="at least 1 slot"):
        Arena(SHAPE, slots=0)


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
        assert torch.equal(arena.down(1)[3], checkpoint.expert(1, 5, torch.float32).down.t())
    assert not arena.slot_bytes(0, 1).any()


def test_the_placement_of_another_model_is_refused(tmp_path):
    write_tiny(tmp_path)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match="does not fit a model of 2 layers x 6 experts"):
        load_arena(checkpoint, linear(layers=2, experts=8, ranks=1), 0, "float32")
