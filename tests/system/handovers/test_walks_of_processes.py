"""Random walks over the forms of layers and both kinds of attention, mixed with migrations, of engines as
`roost up` starts them: each rank is a process, requests come through the router, and both engines walk at the
same time."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from bus import BusError, Declined
from deploy.sections import DEMO_CHECKPOINT
from engine_adapter.batching.sampling import logprobs
from fleet.facts.migrations import MigrationCommitted, MigrationStaged
from fleet.layout import Layout, tp
from fleet.placement import EMPTY, Placement, linear, with_rows
from fleet.requests.plans import MigrateExpert, MigrationAccepted, SetLayout
from tests.engine_adapter.expert_bytes import ExpertBytes
from tests.engine_adapter.rank_threads import RankThreads, Text, rank_threads
from tests.faults.fleet_fixture import until
from tests.system.fleets import Fleet, leave_nothing, new_home
from tests.system.migration_clients import Movers, clients_and_movers
from tests.system.test_moving_experts import memory_of

ENGINES = ("engine-0", "engine-1")
RANKS, LAYERS, EXPERTS, SLOTS = 2, 4, 32, 18
EXPERT_BYTES = 3 * 192 * 64 * 4
"""also of a cell"""
WALKS, STEPS = 5, 4
"""of each engine"""
AT_ONCE = 4
SETS = list(chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS + 1)))
TP = tp(LAYERS)
TP_SHARE = 0.4
"""of changes of layout, to tensor-parallel attention"""
TP_TOLERANCE = 1e-3
"""of log-probabilities, which ranks add up in another order than with data-parallel attention"""
TEXT = Path(__file__).read_bytes()
BATCH = [list(TEXT[at : at + length]) for at, length in ((0, 3), (50, 16), (100, 50), (200, 77))]
BATCH_TOKENS = 8
Order = MigrateExpert | SetLayout
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def walking(backend: str) -> Iterator[Fleet]:
    """Two engines of two ranks each."""
    home = new_home(
        ROOST_ENGINE_KV_BLOCKS="256",
        ROOST_ENGINE_SLOTS_PER_RANK=str(SLOTS),
        ROOST_TRANSFER_BACKEND=backend,
        # A busy machine makes no read overdue, ends no handover, and is not dead.
        ROOST_TRANSFER_MIN_SECONDS="30.0",
        ROOST_PLANNER_STAGE_SECONDS="60.0",
        ROOST_PLANNER_SILENT_SECONDS="20.0",
        ROOST_PLANNER_AUTOMATIC="false",
        ROOST_PLANNER_REPEAT_SECONDS="0.2",
        ROOST_ROUTER_DEAD_AFTER_SECONDS="20.0",
    )
    fleet = Fleet(home, "--ranks", str(RANKS), "--engines", str(len(ENGINES)))
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)


class ProcessReference:
    """Log-probabilities that ranks give which have just loaded a form, in this process."""

    def __init__(self, threads: RankThreads) -> None:
        self._threads = threads
        self._known: dict[tuple[int, ...], list[tuple[list[int], list[float]]]] = {}
        self._one_at_a_time = threading.Lock()

    def batch(self, sharded: tuple[int, ...]) -> list[tuple[list[int], list[float]]]:
        """Tokens of each text of the batch, and log-probabilities of each."""
        with self._one_at_a_time:
            if sharded not in self._known:
                self._known[sharded] = self._computed(sharded)
            return self._known[sharded]

    def _computed(self, sharded: tuple[int, ...]) -> list[tuple[list[int], list[float]]]:
        first = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS)
        placement = with_rows(first, dict.fromkeys(sharded), epoch=0)
        runners = self._threads.load(DEMO_CHECKPOINT, placement, kv_pages=64)
        texts = [Text(prompt, BATCH_TOKENS) for prompt in BATCH]
        self._threads.compute(runners, [texts[rank::RANKS] for rank in range(RANKS)])
        return [(text.chosen, _logprobs(text)) for text in texts]


def _logprobs(text: Text) -> list[float]:
    scored = logprobs(np.stack(text.logits), np.array(text.chosen), [0] * len(text.chosen))
    return [one.chosen for one in scored]


@dataclass
class ProcessWalker:
    """One of the engines on its way."""

    name: str
    fleet: Fleet
    movers: Movers
    http: aiohttp.ClientSession
    reference: ProcessReference
    known: ExpertBytes
    dice: np.random.Generator
    turned: int = 0
    attended: int = 0
    """changes of attention"""

    async def walk(self) -> None:
        for _ in range(STEPS):
            await self.step()
            await self.judge_batch()

    async def step(self) -> None:
        """One plan from its request to rest, and what it left."""
        records = self.movers.records
        history = records.history(self.name)
        before = history.latest
        request, accepted = await self._begin(before)
        end = await until(
            lambda: history.end_of(accepted.plan), lambda: f"an end of {history.of(accepted.plan)}", 60
        )
        assert isinstance(end, MigrationCommitted), end
        after = await until(self._rested, lambda: f"{self.name} rests: {history.latest!r}", 30)
        committed = [one for one in history.of(accepted.plan) if isinstance(one, MigrationCommitted)]
        staged = [one for one in history.of(accepted.plan) if isinstance(one, MigrationStaged)]
        assert len(committed) == len(staged) == accepted.handovers == after.epoch - before.epoch
        read = sum(pull.bytes for one in staged for pull in one.pulls if pull.transfer != "local")
        assert sum(one.bytes for one in committed) == accepted.bytes == read
        if isinstance(request, SetLayout):
            assert after.layout == Layout(request.attention, request.sharded)
        else:
            assert after.replicas_on_rank[request.layer, request.rank, request.expert] == 1
        self.turned += len(set(before.sharded) ^ set(after.sharded))
        self.attended += before.attention != after.attention
        await asyncio.to_thread(self.judge_memory, after)

    async def _begin(self, now: Placement) -> tuple[Order, MigrationAccepted]:
        """Request something at random, until it is accepted."""
        bus, subjects = self.movers.records.bus, self.movers.records.subjects
        while True:
            request = self._any_request(now)
            try:
                answer = await bus.request(subjects.migrate, request, 10)
            except Declined as refusal:
                if "can take none of its experts" not in str(refusal):
                    raise
            except BusError:
                await asyncio.sleep(0.2)
            else:
                assert isinstance(answer, MigrationAccepted)
                return request, answer

    def _any_request(self, now: Placement) -> Order:
        if self.dice.random() < 0.4 and len(now.whole):
            layer = int(self.dice.choice(now.whole))
            rank, expert = self.dice.choice(np.argwhere(now.replicas_on_rank[layer] == 0)).tolist()
            move = bool(self.dice.integers(2))
            return MigrateExpert(engine=self.name, layer=layer, expert=expert, rank=rank, move=move)
        if now.layout != TP and self.dice.random() < TP_SHARE:
            return SetLayout(engine=self.name, sharded=TP.sharded, attention=TP.attention, now=True)
        sets = [one for one in SETS if Layout("dp", one) != now.layout]
        return SetLayout(engine=self.name, sharded=sets[int(self.dice.integers(len(sets)))], now=True)

    async def _rested(self) -> Placement | None:
        """What is on record, once all ranks serve it and nothing is under way."""
        latest = self.movers.records.history(self.name).latest
        return latest if await self.movers.served(self.name) == [latest.epoch] * RANKS else None

    def judge_memory(self, placement: Placement) -> None:
        """Each rank has every expert, and every group of parts, of which the placement says so."""
        processes = self.fleet.processes()
        for rank in range(RANKS):
            cells = memory_of(processes[f"{self.name}/{rank}"].pid).reshape(-1, EXPERT_BYTES)
            found = {xxh3_64_intdigest(cell.tobytes()) for cell in cells}
            for layer, row in enumerate(placement.on_rank(rank).tolist()):
                held = (
                    [self._group(layer, group, rank) for group in range(EXPERTS // RANKS)]
                    if layer in placement.sharded
                    else [self.known.expert(layer, expert) for expert in row if expert != EMPTY]
                )
                lacking = [at for at, one in enumerate(held) if xxh3_64_intdigest(one.tobytes()) not in found]
                assert not lacking, f"{self.name}/{rank}: layer {layer} lacks {lacking}"

    def _group(self, layer: int, group: int, rank: int) -> NDArray[np.uint8]:
        """A group's parts on a rank: uint8 [bytes of a cell]."""
        experts = range(group * RANKS, (group + 1) * RANKS)
        return np.concatenate([self.known.part(layer, expert, rank, RANKS) for expert in experts])

    async def judge_batch(self) -> None:
        """The fixed batch has the bits of ranks that have just loaded this form; with tensor-parallel
        attention, the same tokens with nearly the same log-probabilities."""
        history = self.movers.records.history(self.name)
        now = history.latest
        known = await asyncio.to_thread(self.reference.batch, now.sharded)
        salt = str(self.dice.random())  # KV of other forms is not reused
        urls = history.joins[-1].urls
        found = await asyncio.gather(
            *(self._answer(urls[at % RANKS], prompt, salt) for at, prompt in enumerate(BATCH))
        )
        if now.attention == "dp":
            assert found == known
        else:
            for (tokens, scores), (expected, known_scores) in zip(found, known, strict=True):
                assert tokens == expected
                assert scores == pytest.approx(known_scores, abs=TP_TOLERANCE)

    async def _answer(self, url: str, prompt: list[int], salt: str) -> tuple[list[int], list[float]]:
        body = {
            "prompt": prompt,
            "max_tokens": BATCH_TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        async with self.http.post(f"{url}/v1/completions", json=body, headers=self.fleet.to_ranks) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        (choice,) = found["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("backend", ["shared", "nixl"])
async def test_ten_walks_of_engines_in_processes_lose_nothing_and_change_no_bit_of_a_form(
    backend: str, tmp_path: Path
) -> None:
    with walking(backend) as fleet, rank_threads(tmp_path, RANKS) as threads:
        reference, known = ProcessReference(threads), ExpertBytes(DEMO_CHECKPOINT)
        async with clients_and_movers(fleet) as (clients, movers), aiohttp.ClientSession() as http:
            await until(lambda: asyncio.to_thread(fleet.serving, 2, 2), "both engines serve", 60)
            await clients.learn()
            walkers = [
                ProcessWalker(name, fleet, movers, http, reference, known, np.random.default_rng((seed, 19)))
                for seed, name in enumerate(ENGINES)
            ]
            async with clients.asking(AT_ONCE) as outcomes:
                for _ in range(WALKS):
                    await asyncio.gather(*(walker.walk() for walker in walkers))
            assert not outcomes.wrong, outcomes.wrong[:5]
            assert not outcomes.gone, outcomes.gone[:5]
            assert outcomes.answers > 10
            assert sum(walker.turned for walker in walkers) > WALKS
            attended = sum(walker.attended for walker in walkers)
            assert attended > WALKS // 2
            print(  # noqa: T201
                f"\n{sum(walker.turned for walker in walkers)} layers turned over, {attended} changes of"
                f" attention: {outcomes}"
            )
