"""The placement that an engine begins with: in order, with room for replicas, or as a file says."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from deploy.sections import DEMO_CHECKPOINT
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.model_runner import SequenceWork
from engine_adapter.embedded.setup import build_setup
from engine_adapter.initial_placement import epoch_above, initial, leave_last, read
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.dispatch import served_by
from fleet.placement import EMPTY, Placement, Split, even_split, linear, with_rows, with_slots
from tests.unmeasured_engines import skip_calibration

SIZE = {"layers": 4, "experts": 32, "ranks": 2}


def written(path: Path, placement: Placement) -> Path:
    path.write_bytes(msgspec.json.encode(placement.record()))
    return path


def turned() -> Placement:
    """Not the order of experts, of a later epoch, and with a split of its own."""
    table = np.concatenate([np.arange(16, 32), [EMPTY], np.arange(16), [31]]).astype(np.int16)
    table = np.tile(table, (4, 1))
    even = even_split(table, 32)
    return Placement(table, experts=32, ranks=2, epoch=7, split=Split(even.keep // 2, even.spill, even.near))


def test_without_a_file_experts_lie_in_order_and_what_slots_are_left_is_empty() -> None:
    assert initial(None, **SIZE, slots_per_rank=None) == linear(**SIZE)
    placement = initial(None, **SIZE, slots_per_rank=18)
    assert (placement.slots_per_rank, int((placement.expert_of_slot == EMPTY).sum())) == (18, 4 * 4)


def test_a_file_is_epoch_0_with_its_split_and_may_get_further_slots(tmp_path: Path) -> None:
    file = written(tmp_path / "placement.json", turned())
    placement = initial(file, **SIZE, slots_per_rank=None)
    assert placement.epoch == 0
    assert np.array_equal(placement.expert_of_slot, turned().expert_of_slot)
    assert all(map(np.array_equal, placement.split, turned().split))
    wider = initial(file, **SIZE, slots_per_rank=20)
    demand, node = np.random.default_rng(1).random((2, 4, 32)), np.zeros(2, np.intp)
    assert np.allclose(served_by(wider, demand, node), served_by(placement, demand, node))
    assert wider.on_rank(1)[0].tolist() == [*range(16), 31, EMPTY, EMPTY, EMPTY]


def test_a_file_of_another_model_or_without_a_placement_is_refused_by_name(tmp_path: Path) -> None:
    file = written(tmp_path / "placement.json", turned())
    with pytest.raises(ValueError, match=r"placement\.json.*\(4, 32, 2\); this engine has \(4, 32, 4\)"):
        initial(file, **(SIZE | {"ranks": 4}), slots_per_rank=None)
    with pytest.raises(ValueError, match="17 slots per rank"):
        with_slots(read(file), 16)
    for content in (
        b"",
        b"{}",
        b"\xff\xfe",
        b'{"epoch": 0}',
        msgspec.json.encode(msgspec.structs.replace(turned().record(), slots=b"abc")),
    ):
        (tmp_path / "odd.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"odd\.json: no placement"):
            read(tmp_path / "odd.json")
    with pytest.raises(ValueError, match="no placement"):
        read(tmp_path / "absent.json")


def test_a_file_with_sharded_layers_is_for_engines_that_serve_them(tmp_path: Path) -> None:
    sharded = with_rows(turned(), {1: None, 2: None}, epoch=0)
    file = written(tmp_path / "placement.json", sharded)
    engine = SimulatedEngine(SimulatedConfig(placement=str(file), slots_per_rank=18))
    assert engine.placement == with_slots(sharded, 18)
    with pytest.raises(ValueError, match=r"placement\.json: it has sharded layers.* no kernel"):
        initial(file, **SIZE, slots_per_rank=None, unshardable="no kernel")
    again = SimulatedEngine(SimulatedConfig(slots_per_rank=17), last=sharded.record())
    assert again.placement == sharded


def test_a_simulated_engine_begins_with_the_file_and_the_slots_it_is_given(tmp_path: Path) -> None:
    file = written(tmp_path / "placement.json", turned())
    assert (
        SimulatedEngine(SimulatedConfig(placement=str(file), slots_per_rank=18)).placement.slots_per_rank
        == 18
    )
    assert SimulatedEngine(SimulatedConfig(slots_per_rank=17)).placement.slots_per_rank == 17
    assert (
        SimulatedEngine(SimulatedConfig(placement="aligned", slots_per_rank=17)).placement.slots_per_rank
        == 17
    )
    for wrong, words in (
        ({"placement": "aligend"}, "or a file"),
        ({"slots_per_rank": 15}, "must be 16 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            SimulatedConfig(**wrong)
    with pytest.raises(ValueError, match="no placement"):
        SimulatedEngine(SimulatedConfig(placement=str(tmp_path / "absent.json")))


def test_a_rank_of_the_embedded_engine_has_room_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_calibration(monkeypatch)
    config = EmbeddedConfig(checkpoint=DEMO_CHECKPOINT, slots_per_rank=40, kv_blocks=64, max_batch_tokens=65)
    machine = build_setup(config, 0, None)
    machine.close()
    assert (machine.placement.slots_per_rank, machine.placement.experts) == (40, 32)


def test_a_rank_that_begins_with_the_last_epoch_holds_its_experts_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skip_calibration(monkeypatch)
    config = EmbeddedConfig(
        checkpoint=DEMO_CHECKPOINT, slots_per_rank=33, kv_blocks=64, max_batch_tokens=65, threads=1
    )
    table = np.stack([np.random.default_rng(layer).permutation([*range(32), EMPTY]) for layer in range(4)])
    last = Placement(table, experts=32, ranks=1, epoch=9)
    logits = []
    for meeting in (tmp_path / "first", tmp_path / "next"):
        meeting.mkdir()
        if logits:
            leave_last(meeting, last.record())
        machine = build_setup(config, 0, meeting)
        logits.append(
            machine.runner.forward([SequenceWork(list(b"the same words"), 0, [3], needs_logits=True)]).logits
        )
        machine.close()
    assert machine.placement == last
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("recorded", "open_", "epoch"), [(None, None, 1), (4, None, 5), (4, 5, 6), (5, 5, 6), (None, 1, 2)]
)
def test_an_engine_that_rearranges_joins_above_every_epoch_that_may_still_be_recorded(
    recorded: int | None, open_: int | None, epoch: int
) -> None:
    assert epoch_above(recorded, open_) == epoch
