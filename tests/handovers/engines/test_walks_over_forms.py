"""Random walks of a real engine over the forms of its layers, mixed with migrations, while it answers: its
ranks are threads of this process, everything else is the product's.

After each step: the plan's bytes were moved, no more and no fewer; the books of every rank agree, and what it
serves from is right to the last bit; and a fixed batch has the bits that ranks compute which have just loaded
the same form.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from bus import Declined
from bus.memory import MemoryBroker, MemoryBus
from deploy.process import alongside
from fleet.facts.migrations import MigrationCommitted, MigrationStaged
from fleet.placement import Placement, linear, with_rows
from fleet.requests.plans import MigrateExpert, MigrationAccepted, RollBack, SetLayout
from migration.config import MigrationConfig
from tests.engine_adapter.embedded_ranks import SUBJECTS, EmbeddedRanks, embedded_ranks, write_speaking_model
from tests.engine_adapter.rank_threads import RankThreads, Text, rank_threads
from tests.faults.fleet_fixture import until
from tests.faults.records import Records
from tests.migration.executor_fixture import ask, leading
from tests.unmeasured_engines import skip_calibration

LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 6, 32, 48
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 4
SLOTS = {2: 5, 3: 3, 4: 3}
"""of each layer, by ranks: room for replicas, and for groups of which the last is not full (6 experts, 4
ranks)"""
CONDUCTING = MigrationConfig(automatic=False, repeat_seconds=0.2, stage_seconds=60.0, silent_seconds=20.0)
"""A busy machine ends no handover."""
TEXT = Path(__file__).read_bytes()
BATCH = [list(TEXT[at : at + length]) for at, length in ((0, 4), (50, 15), (100, 16), (200, 40), (300, 61))]
BATCH_TOKENS = 5
LOAD = [list(TEXT[500 + 90 * at : 500 + 90 * at + 1 + 17 * at]) for at in range(5)]
LOAD_TOKENS = 12
STEPS = 3
"""of a walk"""
SAFE_MARGIN = 1e-3
SETS = list(chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS + 1)))
Order = MigrateExpert | RollBack | SetLayout


@dataclass
class Reference:
    """Ranks that have just loaded a form, with whole layers as they are in a first placement."""

    threads: RankThreads
    checkpoint: Path
    _known: dict[tuple[int, ...], tuple[list[list[int]], NDArray[np.float32]]] = field(default_factory=dict)

    def batch(self, sharded: tuple[int, ...]) -> tuple[list[list[int]], NDArray[np.float32]]:
        """Tokens of each text of the batch, and all rows of logits in an order of their own."""
        if sharded not in self._known:
            ranks = self.threads.ranks
            first = linear(layers=LAYERS, experts=EXPERTS, ranks=ranks, slots_per_rank=SLOTS[ranks])
            runners = self.threads.load(
                self.checkpoint, with_rows(first, dict.fromkeys(sharded), epoch=0), kv_pages=64
            )
            texts = [Text(prompt, BATCH_TOKENS) for prompt in BATCH]
            # On other ranks than the engine's, because a text's bits are the same on each.
            self.threads.compute(runners, [texts[(rank + 1) % ranks :: ranks] for rank in range(ranks)])
            rows = [row for text in texts for row in text.logits]
            self._known[sharded] = [text.chosen for text in texts], in_order(rows)
        return self._known[sharded]


def in_order(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Rows in an order that depends on nothing but them: fp32 [rows, vocabulary]."""
    stacked = np.stack(rows)
    return stacked[np.lexsort(stacked.T)]


def moved_bytes(before: Placement, after: Placement) -> int:
    """Bytes that have to go from rank to rank, counted layer by layer."""
    ranks, total = before.ranks, 0
    part = EXPERT_BYTES // ranks
    for layer in range(LAYERS):
        held, will = before.replicas_on_rank[layer], after.replicas_on_rank[layer]
        match layer in before.sharded, layer in after.sharded:
            case False, False:
                total += int(((will > 0) & (held == 0)).sum()) * EXPERT_BYTES
            case False, True:
                total += (EXPERTS * ranks - int(held.sum())) * part
            case True, False:
                total += int(will.sum()) * (ranks - 1) * part
    return total


@dataclass
class Walker:
    """One engine on its way."""

    engine: EmbeddedRanks
    bus: MemoryBus
    records: Records
    reference: Reference
    dice: np.random.Generator
    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(prompt, tokens) of the load"""
    crossed: int = 0
    """answers that began in one epoch and ended in another"""
    turned: int = 0
    """layers"""
    migrated: int = 0
    """plans that moved an expert"""
    undoable: Placement | None = None
    """placement before the last plan"""

    async def walk(self) -> None:
        for _ in range(STEPS):
            async with self.asked():
                await self.step()
            await self.judge_batch()

    async def step(self) -> None:
        """One plan from its request to rest, and what it left."""
        before = self.engine.placement
        request, accepted = await self._begin(before)
        history = self.records.history("a")
        end = await until(
            lambda: history.end_of(accepted.plan), lambda: f"an end of {history.of(accepted.plan)}", 60
        )
        assert isinstance(end, MigrationCommitted), end
        await until(lambda: self.engine.at_rest, f"rest after {accepted.plan}", 20)
        after = self.engine.placement
        self.engine.check()
        self._judge_placement(request, before, after)
        committed = [one for one in history.of(accepted.plan) if isinstance(one, MigrationCommitted)]
        staged = [one for one in history.of(accepted.plan) if isinstance(one, MigrationStaged)]
        assert len(committed) == len(staged) == accepted.handovers == after.epoch - before.epoch
        assert Placement.from_record(history.placements[-1].placement) == after
        read = sum(pull.bytes for one in staged for pull in one.pulls if pull.transfer != "local")
        assert moved_bytes(before, after) == accepted.bytes == read
        assert sum(one.bytes for one in committed) == accepted.bytes
        self.turned += len(set(before.sharded) ^ set(after.sharded))
        self.migrated += isinstance(request, MigrateExpert)
        self.undoable = before

    async def _begin(self, now: Placement) -> tuple[Order, MigrationAccepted]:
        """Request something at random, until it is accepted."""
        while True:
            request = self._any_request(now)
            try:
                return request, await ask(self.bus, request)
            except Declined as refusal:
                if "can take none of its experts" not in str(refusal):
                    raise

    def _any_request(self, now: Placement) -> Order:
        chance, dice = self.dice.random(), self.dice
        if self.undoable is not None and chance < 0.1:
            return RollBack(engine="a")
        if chance < 0.5 and len(now.whole):
            layer = int(dice.choice(now.whole))
            missing = np.argwhere(now.replicas_on_rank[layer] == 0)
            rank, expert = dice.choice(missing).tolist()
            return MigrateExpert(
                engine="a", layer=layer, expert=expert, rank=rank, move=bool(dice.integers(2))
            )
        sets = [one for one in SETS if one != now.sharded]
        return SetLayout(engine="a", sharded=sets[int(dice.integers(len(sets)))], now=True)

    def _judge_placement(self, request: Order, before: Placement, after: Placement) -> None:
        """Layers have the form that was requested, and experts are where they were or were to go."""
        match request:
            case SetLayout():
                assert after.sharded == request.sharded
                first = linear(
                    layers=1, experts=EXPERTS, ranks=after.ranks, slots_per_rank=after.slots_per_rank
                ).expert_of_slot[0]
                for layer in after.whole.tolist():
                    known = first if layer in before.sharded else before.expert_of_slot[layer]
                    assert np.array_equal(after.expert_of_slot[layer], known)
            case MigrateExpert():
                assert after.sharded == before.sharded
                others = [layer for layer in range(LAYERS) if layer != request.layer]
                assert np.array_equal(after.expert_of_slot[others], before.expert_of_slot[others])
                assert after.replicas_on_rank[request.layer, request.rank, request.expert] == 1
            case RollBack():
                assert self.undoable is not None
                assert after.sharded == self.undoable.sharded
                assert np.array_equal(after.replicas_on_rank, self.undoable.replicas_on_rank)

    # requests meanwhile

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """Clients ask one thing after another while the block lasts; every answer comes, and is complete."""
        going = True

        async def client(number: int) -> None:
            while going:
                at = int(self.dice.integers(len(LOAD)))
                rank = self.engine.ranks[number % len(self.engine.ranks)]
                epoch = rank.engine.placement.epoch
                answer = await (await rank.submit(LOAD[at], LOAD_TOKENS)).rest()
                assert answer.outcome is not None
                assert (len(answer.token_ids), answer.outcome.reason) == (LOAD_TOKENS, "length")
                self.answers.append((at, tuple(answer.token_ids)))
                self.crossed += epoch != rank.engine.placement.epoch

        async with asyncio.TaskGroup() as tasks:
            for number in range(2 * len(self.engine.ranks)):
                tasks.create_task(client(number), name=f"client {number}")
            try:
                yield
            finally:
                going = False

    async def judge_batch(self) -> None:
        """The fixed batch has the bits of ranks that have just loaded this form."""
        known = await asyncio.to_thread(self.reference.batch, self.engine.placement.sharded)
        for rank in self.engine.ranks:
            rank.seen.rows.clear()
        ranks, salt = self.engine.ranks, str(self.dice.random())  # KV of other forms is not reused
        streams = [
            await ranks[at % len(ranks)].submit(prompt, BATCH_TOKENS, salt) for at, prompt in enumerate(BATCH)
        ]
        tokens = [(await stream.rest()).token_ids for stream in streams]
        assert tokens == known[0]
        assert np.array_equal(in_order([row for rank in ranks for row in rank.seen.rows]), known[1])

    def judge_answers(self, oracle: Qwen3MoeForCausalLM) -> None:
        """Each token is the one that transformers finds most likely, or nearly so, behind those before it,
        whatever forms computed it."""
        for at, tokens in sorted(set(self.answers)):
            with torch.inference_mode():
                logits = oracle(torch.tensor([[*LOAD[at], *tokens]])).logits[0, len(LOAD[at]) - 1 : -1]
            best = logits.max(dim=1).values
            chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
            assert (best - chosen).max() < SAFE_MARGIN


@dataclass(frozen=True)
class Model:
    folder: Path
    oracle: Qwen3MoeForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    oracle = write_speaking_model(
        folder,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
    )
    return Model(folder, oracle)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_calibration(monkeypatch)


async def walks(model: Model, folder: Path, ranks: int, seed: int, count: int) -> Walker:
    """Let one engine of so many ranks make random walks; the next begins where the last has ended."""
    broker = MemoryBroker(SUBJECTS)
    bus = MemoryBus(broker)
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(rank_threads(folder, ranks))
        engine = await stack.enter_async_context(
            embedded_ranks(
                broker, model.folder, folder, ranks, slots_per_rank=SLOTS[ranks], spare_layers=1 + seed % 2
            )
        )
        await stack.enter_async_context(leading(bus, CONDUCTING))
        records = Records(MemoryBus(broker), SUBJECTS)
        await stack.enter_async_context(alongside(records.follow(), "read what is stored"))
        walker = Walker(
            engine, bus, records, Reference(threads, model.folder), np.random.default_rng((ranks, seed))
        )
        for _ in range(count):
            await walker.walk()
    walker.judge_answers(model.oracle)
    assert walker.answers
    return walker


@pytest.mark.parametrize("ranks", [2, 3])
async def test_some_walks_of_an_engine_lose_nothing_and_change_no_bit_of_a_form(
    model: Model, tmp_path: Path, ranks: int
) -> None:
    walker = await walks(model, tmp_path, ranks, seed=0, count=2)
    assert walker.turned
    assert walker.migrated


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        *((ranks, 1) for ranks in (2, 3, 4)),
        *(
            pytest.param(ranks, seed, marks=pytest.mark.long)
            for ranks, last in ((2, 4), (3, 3), (4, 3))
            for seed in range(2, last + 1)
        ),
    ],
)
async def test_twenty_walks_of_an_engine_lose_nothing_and_change_no_bit_of_a_form(
    model: Model, tmp_path: Path, ranks: int, seed: int
) -> None:
    walker = await walks(model, tmp_path, ranks, seed, count=20)
    assert walker.turned > 20
    assert walker.migrated > 10
    assert walker.crossed, "answers began in one epoch and ended in another"
