"""Engines of two ranks measure their steps in every layout at their start, and serve afterwards as if they had
not."""

import runpy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from engine_adapter.embedded.setup import RankSetup, build_setup
from fleet.placement import Placement, linear, with_attention, with_rows
from tests.unmeasured_engines import skip_calibration

write_tiny = runpy.run_path(str(Path(__file__).parents[2] / "tiny_models.py"))["write_tiny"]
RANKS = 2
PATIENCE = 100.0
Found = TypeVar("Found")
WHOLE = linear(layers=2, experts=6, ranks=RANKS)
SHARDED = with_rows(WHOLE, {0: None, 1: None}, epoch=0)
STARTS = {
    "ep": WHOLE,
    "hybrid": with_rows(WHOLE, {1: None}, epoch=0),
    "experts-tp": SHARDED,
    "tp": with_attention(SHARDED, "tp", epoch=0),
}


@dataclass(frozen=True)
class StartedPair:
    """Two ranks that have been set up, on a thread each."""

    setups: list[RankSetup]
    threads: ThreadPoolExecutor

    def each(self, call: Callable[[int, RankSetup], Found]) -> list[Found]:
        return list(self.threads.map(call, range(RANKS), self.setups, timeout=PATIENCE))

    @property
    def runners(self) -> list[ModelRunner]:
        found = [one.runner for one in self.setups]
        assert all(isinstance(one, ModelRunner) for one in found)
        return found  # type: ignore[return-value]


@contextmanager
def started(model: Path, folder: Path, placement: Placement, **settings: Any) -> Iterator[StartedPair]:
    meeting = Path(mkdtemp(dir=folder))
    (meeting / "placement.json").write_bytes(msgspec.json.encode(placement.record()))
    limits = {"kv_blocks": 64, "max_running": 8, "max_batch_tokens": 32, "calibration_seconds": 0.0}
    config = EmbeddedConfig(
        checkpoint=str(model), ranks=RANKS, placement=str(meeting / "placement.json"), **limits | settings
    )
    with ThreadPoolExecutor(RANKS) as threads:
        ranks = range(RANKS)
        setups = list(threads.map(lambda rank: build_setup(config, rank, meeting), ranks, timeout=PATIENCE))
        try:
            yield StartedPair(setups, threads)
        finally:
            for one in setups:
                one.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


def test_an_engine_states_its_steps_in_every_layout(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path, WHOLE) as pair:
        one, other = (setup.calibration for setup in pair.setups)
        assert pair.setups[0].hardware == pair.setups[1].hardware != ""
    assert [times.layout for times in one.layout_times] == ["ep", "experts-tp", "tp"]
    for times in one.layout_times:
        # Up to 16 sequences; fewer on a machine that is busy at that moment.
        assert times.sequences[0] == 1
        assert 1 < times.sequences[-1] <= 16
        assert times.contexts == (64, 112)
        # Steps of a tiny model take milliseconds, of more sequences longer, also on a busy machine.
        assert all(1e-5 < seconds < 10 for row in times.seconds for seconds in row)
        assert 0 < times.prefill_token < 1
    assert one.layout_times[0].surplus > 0
    assert one.layout_times[1].surplus == one.layout_times[2].surplus == 0
    assert one.layout_times == other.layout_times  # the ranks agree on what they measured together


@pytest.mark.parametrize("start", STARTS)
def test_after_measuring_the_ranks_compute_what_they_would_have_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """Also with ballast, whose bytes are where a layer of another form has weights."""
    placement = STARTS[start]
    works = [[SequenceWork([3 + rank, 7, 9], 0, [rank], needs_logits=True)] for rank in range(RANKS)]
    if placement.attention == "tp":
        works = [works[0]] * RANKS
    logits = []
    for measured in (True, False):
        if not measured:
            skip_calibration(monkeypatch)
        with started(model, tmp_path, placement, ballast_bytes=4096) as pair:
            assert all(runner.placement == placement for runner in pair.runners)
            assert all(not runner.kv_pool.values.any() for runner in pair.runners)
            assert all((setup.calibration.tp_speed is not None) == measured for setup in pair.setups)
            found = pair.each(lambda rank, setup: setup.runner.forward(works[rank]).logits.numpy().copy())
            logits.append(np.concatenate(found))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("start", ["ep", "hybrid", "tp"])
def test_both_speeds_are_measured_whatever_is_served(model: Path, tmp_path: Path, start: str) -> None:
    with started(model, tmp_path, STARTS[start]) as pair:
        for setup in pair.setups:
            tp_speed = setup.calibration.tp_speed
            assert tp_speed is not None
            assert 0 < setup.calibration.speed.step < 10
            assert 0 < tp_speed.step < 10
            assert tp_speed.dispatch == tp_speed.gather_byte == 0


def test_an_engine_that_cannot_change_its_layout_states_no_times_of_layouts(tmp_path: Path) -> None:
    write_tiny(tmp_path / "odd", moe_intermediate_size=15)
    write_tiny(tmp_path / "heads", num_attention_heads=3, num_key_value_heads=1)
    with started(tmp_path / "odd", tmp_path, WHOLE) as pair:
        assert pair.setups[0].calibration.layout_times == ()
        assert pair.setups[0].calibration.tp_speed is None
    with started(tmp_path / "heads", tmp_path, WHOLE) as pair:
        times = pair.setups[0].calibration.layout_times
        assert [one.layout for one in times] == ["ep", "experts-tp"]


def test_an_emulated_network_slows_every_layout_by_its_exchanges(model: Path, tmp_path: Path) -> None:
    delay = 0.004
    with started(model, tmp_path, WHOLE, collective_seconds=delay) as pair:
        before = [setup.step_sync.collectives for setup in pair.setups]
        works = [SequenceWork([3], 0, [0], needs_logits=True)]
        pair.each(lambda rank, setup: setup.runner.forward(works if rank == 0 else [], [1, 0]))
        exchanges = pair.setups[0].step_sync.collectives - before[0]
        times = {one.layout: one for one in pair.setups[0].calibration.layout_times}
    # The exchange that begins a step comes before it. Under tensor-parallel attention, there are the plan of
    # rank 0 and the logits besides.
    assert times["ep"].seconds[0][0] > (exchanges + 1) * delay
    assert times["experts-tp"].seconds[0][0] > (2 * WHOLE.layers + 1) * delay
    assert times["tp"].seconds[0][0] > (2 * WHOLE.layers + 3) * delay
    assert pair.setups[0].calibration.speed.step > (exchanges + 1) * delay / 2
