"""The embedded engine goes over from epoch to epoch while it serves: all ranks at one step, and no bit of any
logit changes."""

import asyncio
import runpy
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.dispatch import SMALL_GATHER_BYTES, GlooDispatch
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.model_runner import Forward, SequenceWork
from engine_adapter.embedded.setup import RankSetup, build_setup
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerStream
from fleet.dispatch import COVER, SPLIT
from fleet.placement import EMPTY, Placement, Split, linear
from tests.fleet.splits import random_split
from tests.unmeasured_engines import skip_calibration

ROOT = Path(__file__).resolve().parents[3]
LAYERS, EXPERTS = 2, 6
PROMPTS = [
    list(b"short"),
    list(b"of fifteen byte"),
    list(b"one that fills two blocks, and reuses them after the first time"),
]
NEW = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that speaks bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(Path(__file__).parents[1] / "tiny_models.py"))["write_tiny"](
        folder, vocab_size=256, eos_token_id=0
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "deploy/demo_model/checkpoint" / name, folder)
    return folder


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_calibration(monkeypatch)


@dataclass
class Witness:
    """A forward pass that keeps what it computed."""

    machine: RankSetup
    rows: list[np.ndarray] = field(default_factory=list)
    """logits of every position that wanted them"""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(collectives made before it, epoch) of every forward pass"""
    routed: list[tuple[Placement, np.ndarray]] = field(default_factory=list)
    """what was served, and the experts of this rank's tokens, of every forward pass"""

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        assert self.machine.experts is not None
        self.steps.append((self.machine.step_sync.collectives, self.machine.runner.placement.epoch))
        found = self.machine.runner.forward(work, tokens_by_rank)
        self.rows += list(found.logits.numpy().copy())
        self.routed.append((self.machine.runner.placement, found.routed))
        return found


@dataclass
class Rank:
    engine: EmbeddedEngine
    run: "asyncio.Task[None]"
    seen: Witness

    async def submit(self, prompt: Sequence[int], count: int = NEW) -> AnswerStream:
        return await self.engine.submit(
            GenerationRequest(prompt=list(prompt), max_tokens=count, ignore_eos=True)
        )


@asynccontextmanager
async def ranks_of(checkpoint: Path, folder: Path, ranks: int, **settings: Any) -> AsyncIterator[list[Rank]]:
    """The ranks of one engine, all in this process, which serve until the block ends."""
    seen: dict[int, Witness] = {}

    def build(config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
        machine = build_setup(config, rank, run_directory)
        seen[rank] = Witness(machine)
        return replace(machine, runner=seen[rank])

    config = EmbeddedConfig(
        checkpoint=checkpoint,
        ranks=ranks,
        threads=1,
        **{"kv_blocks": 64, "max_batch_tokens": 64, "max_running": 8} | settings,
    )
    meeting = Path(mkdtemp(dir=folder))
    engines = [EmbeddedEngine(config, rank, meeting, build=build) for rank in range(ranks)]
    await asyncio.gather(*(engine.start() for engine in engines))
    runs = [
        asyncio.create_task(engine.run(), name=f"rank {rank} under test")
        for rank, engine in enumerate(engines)
    ]
    await asyncio.sleep(0)
    try:
        yield [
            Rank(engine, run, seen[rank])
            for rank, (engine, run) in enumerate(zip(engines, runs, strict=True))
        ]
    finally:
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)


def scattered(random: np.random.Generator, ranks: int, slots: int) -> np.ndarray:
    """One layer: every expert somewhere, some of them several times, some slots empty. int16 [ranks *
    slots]"""
    row = np.full((ranks, slots), EMPTY, np.int16)
    spots = random.permutation(ranks * slots)
    row.flat[spots[:EXPERTS]] = random.permutation(EXPERTS)
    for spot in spots[EXPERTS:]:
        others = np.setdiff1d(np.arange(EXPERTS), row[spot // slots])
        if len(others) and random.random() < 0.6:
            row.flat[spot] = random.choice(others)
    return row.reshape(-1)


def one_layer_anew(random: np.random.Generator, placement: Placement) -> Placement:
    """The next epoch: a layer's experts wherever chance puts them (no more of them arrive at a rank than it
    has room for), all splits new."""
    table = placement.expert_of_slot.copy()
    table[random.integers(len(table))] = scattered(random, placement.ranks, placement.slots_per_rank)
    split: Split = random_split(random, table, EXPERTS, nodes=bool(random.integers(2)))
    return Placement(table, experts=EXPERTS, ranks=placement.ranks, epoch=placement.epoch + 1, split=split)


def staged(engines: Sequence[EmbeddedEngine], reference: Placement) -> list[np.ndarray]:
    """Bring what each rank lacks into its free cells; where its slots are then."""
    return [_stage(engines, rank, reference) for rank in range(len(engines))]


def _cell_of(engine: EmbeddedEngine, rank: int) -> dict[tuple[int, int], int]:
    """Of each (layer, expert) that a rank holds."""
    mine, cells = engine.placement.on_rank(rank), engine.experts.cells
    return {
        (layer, int(mine[layer, slot])): int(cells[layer, slot])
        for layer, slot in np.argwhere(mine != EMPTY).tolist()
    }


def _stage(engines: Sequence[EmbeddedEngine], rank: int, reference: Placement) -> np.ndarray:
    here, memory = _cell_of(engines[rank], rank), engines[rank].experts.memory
    free = sorted(set(range(memory.cells)) - set(engines[rank].experts.cells.ravel().tolist()))
    mine = reference.on_rank(rank)
    cells = np.full(mine.shape, -1, np.int32)
    for layer, slot in np.argwhere(mine != EMPTY).tolist():
        key = (layer, int(mine[layer, slot]))
        if key not in here:
            source = next(
                (other, held[key])
                for other, engine in enumerate(engines)
                if key in (held := _cell_of(engine, other))
            )
            memory.cell(free[0])[:] = engines[source[0]].experts.memory.cell(source[1])
            here[key] = free.pop(0)
        cells[layer, slot] = here[key]
    left = sorted(set(range(memory.cells)) - set(cells.ravel().tolist()))
    cells[cells < 0] = left[: int((cells < 0).sum())]
    return cells


async def go_over(ranks: Sequence[Rank], reference: Placement) -> None:
    engines = [rank.engine for rank in ranks]
    cells = staged(engines, reference)
    prepared = [
        await engine.experts.prepare(reference, mine) for engine, mine in zip(engines, cells, strict=True)
    ]
    async with asyncio.timeout(10):
        await asyncio.gather(
            *(engine.experts.adopt(one) for engine, one in zip(engines, prepared, strict=True))
        )
    for engine, mine in zip(engines, cells, strict=True):
        assert engine.placement == reference
        assert np.array_equal(engine.experts.cells, mine)


def sorted_rows(ranks: Sequence[Rank]) -> np.ndarray:
    """Every row of logits computed since the last call, in an order of their own: who computed them, and
    beside what, is of no importance."""
    rows = np.array([row for rank in ranks for row in rank.seen.rows])
    for rank in ranks:
        rank.seen.rows.clear()
    return rows[np.lexsort(rows.T)]


async def all_prompts(ranks: Sequence[Rank]) -> list[AnswerStream]:
    answers = [await ranks[at % len(ranks)].submit(prompt) for at, prompt in enumerate(PROMPTS)]
    for answer in answers:
        await anext(answer)
    return answers


async def bit_equal_under_live_flips(
    checkpoint: Path, folder: Path, ranks: int, slots: int, dispatch: str = SPLIT
) -> None:
    # Room for all prompts in one step: where a prompt is cut into chunks changes its last bits.
    whole = {"max_batch_tokens": 256}
    async with ranks_of(checkpoint, folder, 1, **whole) as alone:
        for answer in await all_prompts(alone):
            await answer.rest()
        expected = sorted_rows(alone)
    random = np.random.default_rng(ranks)
    async with ranks_of(
        checkpoint, folder, ranks, slots_per_rank=slots, dispatch=dispatch, **whole
    ) as several:
        across = 0
        for _ in range(50):
            answers = await all_prompts(several)
            await go_over(several, one_layer_anew(random, several[0].engine.placement))
            across += sum(not answer.over for answer in answers)
            for answer in answers:
                await answer.rest()
            found = sorted_rows(several)
            assert found.shape == expected.shape == (len(PROMPTS) * NEW, 256)
            assert np.array_equal(found, expected)
        assert across, "some answers began in one epoch and ended in the next"
        assert several[0].engine.placement.epoch == 50


async def test_fifty_scattered_placements_one_after_another_under_load_change_no_bit(
    checkpoint: Path, tmp_path: Path
) -> None:
    await bit_equal_under_live_flips(checkpoint, tmp_path, ranks=2, slots=5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("small_gather_bytes", "dispatch"),
    [(SMALL_GATHER_BYTES, SPLIT), (0, COVER)],
    ids=["small-steps", "as-large-steps-and-cover"],
)
async def test_fifty_scattered_placements_on_four_ranks_change_no_bit(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_gather_bytes: int, dispatch: str
) -> None:
    monkeypatch.setitem(GlooDispatch.__init__.__kwdefaults__, "small_gather_bytes", small_gather_bytes)
    await bit_equal_under_live_flips(checkpoint, tmp_path, ranks=4, slots=3, dispatch=dispatch)


@pytest.mark.parametrize("handovers", [0, 3])
async def test_a_step_in_which_all_go_over_takes_no_collective_more(
    checkpoint: Path, tmp_path: Path, handovers: int
) -> None:
    random = np.random.default_rng(5)
    async with ranks_of(checkpoint, tmp_path, 2, slots_per_rank=5, max_running=1) as ranks:
        answers = [
            await ranks[0].submit(PROMPTS[0], 20) for _ in range(60)
        ]  # one after the other, without a pause
        for _ in range(handovers):
            await go_over(ranks, one_layer_anew(random, ranks[0].engine.placement))
        await answers[3].rest()
        assert not answers[-1].over
        seen = [list(rank.seen.steps) for rank in ranks]
    for steps in seen:
        before, epochs = (np.array(column) for column in zip(*steps, strict=True))
        assert set(epochs.tolist()) | {0} == set(range(handovers + 1))
        assert set(np.diff(epochs).tolist()) <= {0, 1}, "one after the other"
        assert set(np.diff(before).tolist()) == {1 + 2 * LAYERS}
    assert all(one == other for (_, one), (_, other) in zip(*seen, strict=False)), (
        "both ranks served the same epoch in every step"
    )


def sent_by_hand(ranks: Sequence[Rank], rank: int, epoch: int) -> list[list[float]]:
    """Of each layer: ranks reached, own pairs at home, pairs served, balance; of placements in which every
    expert is in one slot only."""
    found = [[0.0] * 4 for _ in range(LAYERS)]
    for passes in zip(*(one.seen.routed for one in ranks), strict=True):
        placement = passes[0][0]
        if placement.epoch != epoch:
            continue
        for layer, sums in enumerate(found):
            holder = {
                int(expert): slot // placement.slots_per_rank
                for slot, expert in enumerate(placement.expert_of_slot[layer])
            }
            by = [
                [[holder[expert] for expert in token[layer].tolist()] for token in routed]
                for _, routed in passes
            ]
            pairs = [at for tokens in by for token in tokens for at in token]
            loads = [pairs.count(at) for at in range(len(ranks))]
            sums[0] += sum(len(set(token) - {rank}) for token in by[rank])
            sums[1] += sum(token.count(rank) for token in by[rank])
            sums[2] += loads[rank]
            sums[3] += sum(loads) / len(loads) / max(loads)
    return found


@pytest.mark.parametrize("small_gather_bytes", [SMALL_GATHER_BYTES, 0], ids=["small-steps", "as-large-steps"])
async def test_where_tokens_were_sent_is_reported_per_epoch_as_counting_by_hand_finds_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_gather_bytes: int
) -> None:
    monkeypatch.setitem(GlooDispatch.__init__.__kwdefaults__, "small_gather_bytes", small_gather_bytes)
    random = np.random.default_rng(8)
    async with ranks_of(checkpoint, tmp_path, 2, slots_per_rank=3) as ranks:
        for _ in range(3):
            answers = await all_prompts(ranks)
            await go_over(ranks, one_layer_anew(random, ranks[0].engine.placement))
            for answer in answers:
                await answer.rest()
        for answer in await all_prompts(ranks):
            await answer.rest()
        for rank in ranks:
            rank.run.cancel()
        await asyncio.wait([rank.run for rank in ranks])
        steps = []
        for number, rank in enumerate(ranks):
            sent = rank.engine.take_facts().sent
            assert [one.epoch for one in sent] == [0, 1, 2, 3]
            for one in sent:
                expected = np.array(sent_by_hand(ranks, number, one.epoch))
                assert np.stack(
                    [one.remote_ranks, one.local, one.served, one.balance], axis=1
                ) == pytest.approx(expected)
                assert one.step_seconds > 0
            steps.append([one.steps for one in sent])
            assert sum(one.tokens for one in sent) == sum(len(routed) for _, routed in rank.seen.routed)
        assert steps[0] == steps[1]
        assert sum(steps[0]) == len(ranks[0].seen.routed)


async def test_a_rank_that_alone_is_ready_goes_nowhere_and_serves_until_the_other_is(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with ranks_of(checkpoint, tmp_path, 2, slots_per_rank=5) as ranks:
        engines = [rank.engine for rank in ranks]
        reference = one_layer_anew(np.random.default_rng(6), engines[0].placement)
        prepared = [
            await engine.experts.prepare(reference, mine)
            for engine, mine in zip(engines, staged(engines, reference), strict=True)
        ]
        first = asyncio.create_task(engines[0].experts.adopt(prepared[0]))
        for rank in ranks:
            assert len((await (await rank.submit(PROMPTS[2])).rest()).token_ids) == NEW
        assert not first.done()
        assert [engine.placement.epoch for engine in engines] == [0, 0]
        with pytest.raises(ValueError, match="epoch 1 is still pending"):
            await engines[0].experts.adopt(
                await engines[0].experts.prepare(reference, engines[0].experts.cells)
            )
        first.cancel()  # nobody waits any more, but what was said is said
        async with asyncio.timeout(5):
            await engines[1].experts.adopt(prepared[1])
        assert len((await (await ranks[0].submit(PROMPTS[2])).rest()).token_ids) == NEW
        assert [engine.placement for engine in engines] == [reference, reference]


async def test_an_engine_at_rest_goes_over_in_an_empty_step_and_rests_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with ranks_of(checkpoint, tmp_path, 2, slots_per_rank=5) as ranks:
        before = [rank.seen.machine.step_sync.collectives for rank in ranks]
        await go_over(ranks, one_layer_anew(np.random.default_rng(7), ranks[0].engine.placement))
        assert [rank.seen.steps for rank in ranks] == [[], []]
        assert all(
            rank.seen.machine.step_sync.collectives - one <= 3
            for rank, one in zip(ranks, before, strict=True)
        )


async def test_an_engine_that_loses_a_rank_before_all_are_ready_ends_as_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with ranks_of(checkpoint, tmp_path, 2) as ranks:
        engines = [rank.engine for rank in ranks]
        same = replace_epoch(engines[0].placement, 1)
        waiting = asyncio.create_task(
            engines[0].experts.adopt(await engines[0].experts.prepare(same, engines[0].experts.cells))
        )
        assert (await (await ranks[0].submit(PROMPTS[0])).rest()).token_ids
        ranks[1].run.cancel()
        with pytest.raises(EngineFailed, match="rank 1 of this engine stopped"):
            await waiting
        with pytest.raises(EngineFailed, match="rank 1 of this engine stopped"):
            await ranks[0].run
        with pytest.raises(EngineFailed, match="rank 1 of this engine stopped"):
            await engines[0].experts.adopt(await engines[0].experts.prepare(same, engines[0].experts.cells))
        assert engines[0].placement.epoch == 0


def replace_epoch(placement: Placement, epoch: int) -> Placement:
    return Placement(placement.expert_of_slot, experts=placement.experts, ranks=placement.ranks, epoch=epoch)


async def test_what_does_not_fit_is_refused_before_anything_changes(checkpoint: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        (one,) = await stack.enter_async_context(ranks_of(checkpoint, tmp_path, 1))
        (other,) = await stack.enter_async_context(ranks_of(checkpoint, tmp_path, 1))
        experts, cells = one.engine.experts, one.engine.experts.cells
        after = replace_epoch(one.engine.placement, 1)
        wrong = cells.copy()
        wrong[0, 0] = wrong[1, 1]
        for placement, where, words in (
            (linear(layers=LAYERS, experts=EXPERTS, ranks=2), cells, "same layers, experts, ranks and slots"),
            (
                linear(layers=LAYERS, experts=EXPERTS, ranks=1, slots_per_rank=7),
                cells,
                "same layers, experts, ranks and slots",
            ),
            (after, cells[:1], "one per slot"),
            (after, cells.astype(np.int64), "expected int32"),
            (after, wrong, "a cell of its own"),
            (after, cells + experts.memory.cells, "from 0 to 17"),
            (after, cells - 1, "from 0 to 17"),
        ):
            with pytest.raises(ValueError, match=words):
                await experts.prepare(placement, where)
        for epoch in (0, 2):
            with pytest.raises(ValueError, match=f"epoch {epoch} cannot follow epoch 0"):
                await experts.adopt(await experts.prepare(replace_epoch(after, epoch), cells))
        with pytest.raises(TypeError, match="not prepared by this engine"):
            await experts.adopt(after)
        with pytest.raises(ValueError, match="read-only"):
            cells[0, 0] = 3
        assert one.engine.placement.epoch == other.engine.placement.epoch == 0
        await experts.adopt(await experts.prepare(after, cells))
        assert one.engine.placement == after
