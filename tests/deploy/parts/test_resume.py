"""A new life of an engine goes on with the epoch that the last one ended in: what counts as that, and how all
ranks come to know it."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.parts.resume import READ_SECONDS, agree, last_record
from engine_adapter.engine import EngineFailed
from engine_adapter.initial_placement import fitting, last_decided, leave_last, resumed
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationStaged, PlanEvaluated
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState
from fleet.layout import DP_ATTENTION, TP_ATTENTION
from fleet.placement import Placement, linear, with_attention, with_rows
from migration.handover.coordinator import OpenHandover
from tests.deploy.loop_figures import PREDICTED, START

SUBJECTS = Subjects()
FIRST = linear(layers=2, experts=4, ranks=2, slots_per_rank=3)


def placement(epoch: int) -> Placement:
    """Another for every epoch."""
    table = np.roll(FIRST.expert_of_slot.reshape(2, 2, 3), epoch, axis=2).reshape(2, 6)
    return Placement(table, experts=4, ranks=2, epoch=epoch)


def committed(epoch: int, worker_id: int = 1) -> PlacementCommitted:
    return PlacementCommitted(
        engine="e", worker_id=worker_id, attention=DP_ATTENTION, placement=placement(epoch).record()
    )


def staged(epoch: int, worker_id: int = 1) -> MigrationStaged:
    whole = {"plan": "p", "handover": epoch, "number": 0, "copies": 1, "bytes": 1, "seconds": 1.0}
    return MigrationStaged(
        engine="e", worker_id=worker_id, epoch=epoch, placement=placement(epoch).record(), **whole
    )


@pytest.mark.parametrize(
    ("last", "before", "epoch"),
    [
        (None, None, None),
        (committed(0), None, None),
        (committed(3), None, 3),
        (committed(3), staged(4), 4),
        (committed(0), staged(1), 1),
        (committed(3), staged(3), 3),
        (committed(3), staged(5), 3),
        (committed(0, worker_id=2), staged(4), None),
        (committed(4, worker_id=2), staged(4), 4),
        (committed(4), staged(5, worker_id=2), 5),
        (None, staged(2), 2),
    ],
)
def test_the_last_epoch_is_the_one_committed_or_the_one_after_it_if_that_was_decided(
    last: PlacementCommitted | None, before: MigrationStaged | None, epoch: int | None
) -> None:
    found = last_decided(last, before)
    assert (None if found is None else found.epoch) == epoch


def test_a_placement_of_other_slots_or_another_model_or_broken_does_not_fit() -> None:
    assert fitting(placement(7).record(), FIRST) == placement(7)
    for other in (
        linear(layers=2, experts=4, ranks=2, slots_per_rank=2),
        linear(layers=2, experts=5, ranks=2),
        linear(layers=1, experts=4, ranks=2),
    ):
        with pytest.raises(ValueError, match=r"epoch 7 was of .* \(2, 4, 2, 3\); the engine now has"):
            fitting(placement(7).record(), other)


def test_an_epoch_with_sharded_layers_fits_an_engine_that_serves_them() -> None:
    sharded = with_rows(placement(7), {1: None}, epoch=8)
    last = PlacementCommitted(engine="e", worker_id=1, attention=DP_ATTENTION, placement=sharded.record())
    record = last_decided(last, None)
    assert record is not None
    assert fitting(record, FIRST, unshardable="") == sharded
    with pytest.raises(ValueError, match=r"epoch 8: it has sharded layers.* cannot serve: no kernel"):
        fitting(record, FIRST, unshardable="no kernel")


def test_an_epoch_with_tensor_parallel_attention_fits_an_engine_that_serves_it() -> None:
    every = with_rows(placement(7), {0: None, 1: None}, epoch=7)
    for tp_, reason in (
        (with_attention(every, "tp", epoch=8), ""),
        (with_attention(placement(7), "tp", epoch=8), "its experts are whole"),
    ):
        last = PlacementCommitted(
            engine="e",
            worker_id=1,
            attention=TP_ATTENTION,
            placement=with_attention(tp_, "dp", epoch=8).record(),
        )
        for stated in (last, msgspec.structs.replace(last, placement=tp_.record())):
            record = last_decided(stated, None)
            assert record is not None
            with pytest.raises(ValueError, match="cannot serve: its heads do not divide"):
                fitting(record, FIRST, "", "its heads do not divide")
            if reason:
                with pytest.raises(ValueError, match=f"cannot serve: {reason}"):
                    fitting(record, FIRST, "", "")
            else:
                assert fitting(record, FIRST, "", "") == tp_


def test_ranks_begin_with_what_was_left_for_them_if_it_fits_and_say_so_if_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(tmp_path, FIRST) == FIRST
    leave_last(tmp_path, None)
    assert resumed(tmp_path, FIRST) == FIRST
    assert not caplog.records
    leave_last(tmp_path, placement(5).record())
    assert resumed(tmp_path, FIRST) == placement(5)
    assert [file.name for file in tmp_path.iterdir()] == ["last-placement.json"]
    for wrong, words in (
        (linear(layers=2, experts=4, ranks=2).record(), "epoch 0 was of"),
        (b"{", "truncated"),
    ):
        if isinstance(wrong, bytes):
            (tmp_path / "last-placement.json").write_bytes(wrong)
        else:
            leave_last(tmp_path, wrong)
        assert resumed(tmp_path, FIRST) == FIRST
        assert words in caplog.text
        assert "starts with its configured placement" in caplog.text


def opened(state: CoordinatorState, handover: int) -> bytes:
    whole = {"plan": "p", "number": 0, "last": True, "copied": 1, "bytes": 1, "token": 1}
    return msgspec.json.encode(
        OpenHandover(state=state, worker_id=1, ranks=2, handover=handover, epoch=handover, **whole)
    )


def judged(engine: str = "e") -> PlanEvaluated:
    figures = {"predicted_before": START, "predicted_after": PREDICTED, "plan_discount": 1.0}
    return PlanEvaluated(
        engine=engine, worker_id=1, plan="o", epoch=2, verdict="kept", reason="it stays", **figures
    )


async def test_the_bus_is_asked_for_what_was_decided_last(tmp_path: Path) -> None:
    bus = MemoryBus()
    assert await last_record(bus, SUBJECTS, "e") is None
    for epoch in (0, 1, 2):
        await bus.record(SUBJECTS.placements("e"), committed(epoch))
    await bus.record(SUBJECTS.placements("other"), committed(9))
    await bus.record(SUBJECTS.migrations("e"), staged(3))
    assert (await last_record(bus, SUBJECTS, "e")) == placement(2).record()
    revision = await bus.claim(SUBJECTS.handover_key("e"), opened(CoordinatorState.PROPOSING, 3))
    assert (await last_record(bus, SUBJECTS, "e")) == placement(2).record()
    revision = await bus.claim(SUBJECTS.handover_key("e"), opened(CoordinatorState.COMMITTING, 4), revision)
    assert (await last_record(bus, SUBJECTS, "e")) == placement(2).record()
    revision = await bus.claim(SUBJECTS.handover_key("e"), opened(CoordinatorState.COMMITTING, 3), revision)
    assert (await last_record(bus, SUBJECTS, "e")) == placement(3).record()
    revision = await bus.claim(SUBJECTS.handover_key("e"), b"{", revision)
    assert (await last_record(bus, SUBJECTS, "e")) == placement(2).record()
    await bus.claim(SUBJECTS.handover_key("e"), opened(CoordinatorState.ABORTING, 3), revision)
    whole = {"engine": "e", "worker_id": 1, "plan": "p", "handover": 3, "number": 0, "epoch": 3}
    await bus.record(
        SUBJECTS.migrations("e"), MigrationAborted(**whole, reason="a rank was lost", fault="gone")
    )
    assert (await last_record(bus, SUBJECTS, "e")) == placement(2).record()
    await bus.record(SUBJECTS.migrations("e"), staged(3))
    await bus.record(
        SUBJECTS.migrations("e"),
        MigrationCommitted(**whole, copies=1, bytes=1, seconds=1, commit_seconds=1, last=True),
    )
    await bus.record(SUBJECTS.placements("e"), committed(3))
    assert (await last_record(bus, SUBJECTS, "e")) == placement(3).record()
    await bus.close()


async def test_a_verdict_on_an_earlier_plan_hides_nothing_that_was_decided() -> None:
    now = [1_000_000.0]
    bus = MemoryBus(MemoryBroker(clock=lambda: now[0]))
    await bus.record(SUBJECTS.placements("e"), committed(2))
    await bus.record(SUBJECTS.migrations("e"), staged(3))
    await bus.claim(SUBJECTS.handover_key("e"), opened(CoordinatorState.COMMITTING, 3))
    for hours in (1, 24):  # a handover may take long, and so may the way to the engine's next life
        now[0] += hours * 3600
        await bus.record(SUBJECTS.migrations("e"), judged())
        assert (await last_record(bus, SUBJECTS, "e")) == placement(3).record()
    await bus.record(SUBJECTS.migrations("other"), judged("other"))
    await bus.record(SUBJECTS.placements("other"), committed(2))
    assert (await last_record(bus, SUBJECTS, "other")) == placement(2).record()
    await bus.close()


@pytest.mark.looptime
async def test_all_ranks_learn_it_from_the_first(tmp_path: Path) -> None:
    bus = MemoryBus()
    await bus.record(SUBJECTS.placements("e"), committed(6))
    others = [asyncio.create_task(agree(bus, SUBJECTS, "e", rank, tmp_path, 60.0)) for rank in (1, 2, 3)]
    await asyncio.sleep(5)
    assert not any(one.done() for one in others)
    await agree(bus, SUBJECTS, "e", 0, tmp_path, 60.0)
    await asyncio.gather(*others)
    assert resumed(tmp_path, FIRST) == placement(6)
    await bus.close()


@pytest.mark.looptime
async def test_a_rank_waits_for_the_first_one_only_so_long(tmp_path: Path) -> None:
    bus = MemoryBus()
    with pytest.raises(EngineFailed, match="rank 0 did not report within 30 s which epoch e begins with"):
        await agree(bus, SUBJECTS, "e", 1, tmp_path, 30.0)
    await bus.close()


@pytest.mark.looptime
@pytest.mark.parametrize("failure", [BusError("no store"), None])
async def test_a_bus_that_cannot_say_delays_an_engine_but_does_not_stop_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: BusError | None,
) -> None:
    async def replay(*_: object, **__: object):  # type: ignore[no-untyped-def]
        if failure is not None:
            raise failure
        await asyncio.sleep(3600)
        yield None

    bus = MemoryBus()
    monkeypatch.setattr(bus, "replay", replay)
    began = asyncio.get_running_loop().time()
    await agree(bus, SUBJECTS, "e", 0, tmp_path, 60.0)
    assert asyncio.get_running_loop().time() - began <= READ_SECONDS + 1
    assert resumed(tmp_path, FIRST) == FIRST
    assert ("no store" if failure else "did not answer") in caplog.text
    await bus.close()
