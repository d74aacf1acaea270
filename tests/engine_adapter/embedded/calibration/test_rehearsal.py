"""Rehearsed steps: work of the planned size on every rank, reported as steps in service are."""

import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.calibration.cells import Cell, DecodeCell, PromptCell, owned
from engine_adapter.embedded.calibration.rehearsal import RehearsedStep, StepRehearsal, event_loop
from engine_adapter.embedded.model_runner import ModelRunner
from engine_adapter.embedded.setup import build_setup
from engine_adapter.embedded.step_results import StepReport
from engine_adapter.serving.generation import AnswerDelta
from fleet.placement import Placement, linear, with_attention, with_rows
from tests.unmeasured_engines import skip_calibration

write_tiny = runpy.run_path(str(Path(__file__).parents[2] / "tiny_models.py"))["write_tiny"]
RANKS = 2
PATIENCE = 100.0
EP = linear(layers=2, experts=6, ranks=RANKS)
TP = with_attention(with_rows(EP, {0: None, 1: None}, epoch=0), "tp", epoch=0)
CELLS: list[Cell] = [DecodeCell(5, 64), DecodeCell(1, 10), PromptCell(20, 16), PromptCell(7, alone=True)]


def rehearsed(
    folder: Path, placement: Placement, cell: Cell
) -> list[tuple[list[RehearsedStep], list[StepReport]]]:
    """Make all steps of a kind, and return those of each rank with their reports."""
    (folder / "placement.json").write_bytes(msgspec.json.encode(placement.record()))
    config = EmbeddedConfig(
        checkpoint=str(folder / "model"),
        ranks=RANKS,
        placement=str(folder / "placement.json"),
        kv_blocks=64,
        max_running=8,
        max_batch_tokens=32,
    )

    def run(rank: int) -> tuple[list[RehearsedStep], list[StepReport]]:
        setup = build_setup(config, rank, folder)
        assert isinstance(setup.runner, ModelRunner)
        reports: list[StepReport] = []
        try:
            rehearsal = StepRehearsal(setup.runner, setup.step_sync, config, reports.append)
            kind = rehearsal.of(cell)
            steps = [rehearsal.step(kind) for _ in range(cell.steps)]
            assert kind.left == 0
        finally:
            setup.close()
        return steps, reports

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(run, range(RANKS), timeout=PATIENCE))


@pytest.mark.parametrize("placement", [EP, TP], ids=["ep", "tp"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_step_computes_all_sequences_and_reports_a_token_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement, cell: Cell
) -> None:
    skip_calibration(monkeypatch)
    write_tiny(tmp_path / "model")
    ranks = range(RANKS)
    mine = [len(owned(cell, placement.attention, rank, RANKS)) for rank in ranks]
    for rank, (steps, reports) in zip(ranks, rehearsed(tmp_path, placement, cell), strict=True):
        assert len(steps) == cell.steps
        for step in steps:
            assert step.tokens_by_rank == tuple(cell.tokens * count for count in mine)
            # Under tensor-parallel attention, every rank computes what rank 0 has planned.
            assert len(step.routed) == cell.tokens * mine[0 if placement.attention == "tp" else rank]
            assert step.seconds > 0
        news = [delta for report in reports for _, delta in report.news]
        assert len(news) == mine[rank] * cell.steps
        assert all(isinstance(one, AnswerDelta) and len(one.token_ids) == 1 for one in news)


def test_reports_arrive_on_a_thread_of_their_own_which_ends_with_the_measurement() -> None:
    before = set(threading.enumerate())
    with event_loop() as deliver:
        (thread,) = set(threading.enumerate()) - before
        deliver(StepReport(facts=True))
    assert not thread.is_alive()
