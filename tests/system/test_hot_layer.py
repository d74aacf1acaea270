"""A layer of a real engine whose traffic all goes to one rank: the planner shards it by itself, and no answer is
another."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.config import BusConfig
from bus.nats import NatsBus
from deploy.process import alongside
from engine_adapter.embedded import setup
from engine_adapter.embedded.calibration.calibrate import EngineCalibration
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned
from fleet.layout_times import LayoutName, LayoutTimes
from fleet.requests.layouts import DescribeLayouts, LayoutsDescribed
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from tests.engine_adapter.embedded_ranks import SUBJECTS, EmbeddedRanks, embedded_ranks, write_speaking_model
from tests.faults.fleet_fixture import until
from tests.migration.builders import leading
from tracker.config import TrackerConfig
from tracker.service import TrackerService

LAYERS, EXPERTS, RANKS = 4, 8, 2
HOT = 2
"""Layer in which all pairs are served by rank 0."""
PROMPTS = [
    list(text.encode()) for text in ("Once upon a time", "def main():", "Tell me about Debian.", "<html>")
]
TOKENS = 24
AT_ONCE = 8
PLANNING = MigrationConfig(
    policy="reweight",  # experts keep their places, so that nothing else can relieve the rank
    layout_policy="regret",
    cycle_seconds=1.0,
    window_seconds=2.0,
    stale_seconds=2.0,
    evaluation_seconds=600.0,  # no verdict within the test: steps of so small a model say nothing
    min_pairs=4.0,
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model. Of two opposite rows of a gate one is above 0, which all others are, so that a token takes an
    expert of each pair of rows: in the hot layer of two pairs on rank 0, elsewhere of one on each rank."""
    folder = tmp_path / "model"
    model = write_speaking_model(folder, num_hidden_layers=LAYERS, num_experts=EXPERTS)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            gate = layer.mlp.gate.weight
            rows = gate[:2].clone()
            gate.zero_()
            for first, row in zip((0, 2 if number == HOT else EXPERTS // RANKS), rows, strict=True):
                gate[first], gate[first + 1] = row, -row
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine state steps of a machine where a hot layer costs twice what other layers take together, and
    sharding all layers costs more than that: gains far beyond what a busy machine makes of live steps."""

    def times(layout: LayoutName, factor: float) -> LayoutTimes:
        rows = (tuple(factor * (4e-3 + 2e-5 * batch) for batch in (1, 4, 16, 64)),)
        return LayoutTimes(
            layout=layout,
            sequences=(1, 4, 16, 64),
            contexts=(32,),
            seconds=rows,
            noise=0.01,
            prefill_token=1e-5,
        )

    found = EngineCalibration(
        speed=EngineSpeed(expert_pair=1e-3, dispatch=0.0),
        layout_times=(times("ep", 1.0), times("experts-tp", 4.0)),
    )
    monkeypatch.setattr(setup, "calibrated", lambda *_, **__: found)


class Users:
    """Ask the same over and over, at all ranks in turn."""

    def __init__(self, engine: EmbeddedRanks) -> None:
        self._engine = engine
        self.answers: set[tuple[int, tuple[int, ...]]] = set()
        """(prompt, tokens)"""

    async def ask(self, number: int) -> None:
        prompt = number % len(PROMPTS)
        stream = await self._engine.ranks[number % RANKS].submit(PROMPTS[prompt], TOKENS, salt=str(number))
        self.answers.add((prompt, tuple((await stream.rest()).token_ids)))

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        numbers, going = itertools.count(), True

        async def one() -> None:
            while going:
                await self.ask(next(numbers))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(one())
            try:
                yield
            finally:
                going = False


async def test_the_planner_shards_a_hot_layer_under_load_and_answers_stay_equal(
    checkpoint: Path, tmp_path: Path, nats_server: Any
) -> None:
    async with AsyncExitStack() as stack:
        buses = []
        for _ in range(RANKS + 3):
            buses.append(await NatsBus.connect(nats_server.url, SUBJECTS, BusConfig()))
            stack.push_async_callback(buses[-1].close)
        *of_ranks, of_tracker, of_planner, ours = buses
        engine = await stack.enter_async_context(embedded_ranks(of_ranks, checkpoint, tmp_path, RANKS))
        users = Users(engine)
        for number in range(len(PROMPTS)):
            await users.ask(number)
        before = set(users.answers)
        tracker = TrackerService(of_tracker, SUBJECTS, TrackerConfig(publish_seconds=0.2))
        await stack.enter_async_context(alongside(tracker.run(), "the tracker"))
        await stack.enter_async_context(leading(of_planner, PLANNING))

        async with users.asking():
            await until(lambda: engine.ranks[0].engine.placement.sharded, "a layer is sharded", 60)
            await until(lambda: engine.at_rest, "all ranks serve it", 20)
        assert engine.placement.sharded == (HOT,)
        for number in range(len(PROMPTS)):
            await users.ask(number)
        assert users.answers == before
        engine.check()
        log = [one.message async for one in ours.replay(SUBJECTS.migrations("a"), follow=False)]
        (planned,) = [one for one in log if isinstance(one, MigrationPlanned)]
        assert (planned.origin, planned.policy, planned.to_sharded) == ("planner", "layers: regret", (HOT,))
        assert any(isinstance(one, MigrationCommitted) and one.last for one in log)
        answer = await ours.request(SUBJECTS.loop, DescribeLayouts(), 5)
        assert isinstance(answer, LayoutsDescribed)
        (shown,) = answer.engines
        assert (shown.layout, shown.automatic) == (f"dp, layers {HOT} sharded", True)
        assert shown.single_layers.startswith("single layers: ")
