"""Clients that know what they should be told, and experts that move meanwhile."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.process import alongside
from deploy.sections import DEMO_CHECKPOINT
from fleet.facts.migrations import MigrationCommitted
from fleet.requests.handovers import DescribeHandover, HandoverDescribed
from migration.model.plan import Plan
from tests.faults.fleet_fixture import until
from tests.faults.plans import series
from tests.faults.records import Ended, Records
from tests.system.fleets import MODEL, Fleet

MARGIN = 1e-3
"""logits nearer to each other than this may come out the other way round"""
TOKENS = 40
TEXTS = (
    "Tell me about Debian.",
    "Once upon a time there was a river, and beside it a house.",
    "def main(arguments):\n    for argument in arguments:",
    "<html><head><title>Roost</title></head><body><p>",
    "Die Datenbank wird mit dem folgenden Befehl",
    "#include <stdio.h>\nint main(void) {",
    "Le fichier de configuration contient",
    "The license grants you the right to",
)


class Answer(NamedTuple):
    """Tokens, and by how much the best of each was better than the second: 0 where that is not known."""

    tokens: list[int]
    margins: list[float]


async def answer(http: aiohttp.ClientSession, prompt: list[int], count: int) -> Answer:
    """What the fleet says at temperature 0; anything but a full answer is an error."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, f"{answer.status}: {await answer.text()}"
        choice: dict[str, Any] = (await answer.json())["choices"][0]
    apart = margins(choice)
    assert len(choice["token_ids"]) == len(apart) == count, choice
    return Answer(choice["token_ids"], apart)


def margins(choice: dict[str, Any]) -> list[float]:
    """Of each token of a choice that has the logits of the two best."""
    tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]


@dataclass
class Outcomes:
    """What clients got, against the reference."""

    answers: int = 0
    tokens: int = 0
    exact: int = 0
    """answers equal from the first token to the last"""
    misses: int = 0
    """tokens that differ where the reference's choice was a close one"""
    wrong: list[str] = field(default_factory=list)
    """answers that differ where it was not"""
    gone: list[str] = field(default_factory=list)
    """requests that got none"""

    def __str__(self) -> str:
        return (
            f"{self.answers} answers of {self.tokens} tokens, {self.exact} exact; close misses {self.misses},"
            f" wrong {len(self.wrong)}, lost {len(self.gone)}"
        )


class Clients:
    """Ask the same things over and over, and compare with what was said before anything moved."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.outcomes = Outcomes()
        self._http = http
        tokenizer = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
        self._prompts = [list(tokenizer.encode(text).ids) for text in TEXTS]
        self._whole: list[Answer] = []
        self._numbers = itertools.count()

    async def learn(self) -> None:
        """The reference."""
        self._whole = [await answer(self._http, prompt, TOKENS) for prompt in self._prompts]

    @asynccontextmanager
    async def asking(self, at_once: int) -> AsyncIterator[Outcomes]:
        """So many clients ask while the context lasts; their last requests are answered before it ends."""
        self.outcomes, going = Outcomes(), True

        async def client() -> None:
            while going:
                await self.ask()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(client(), name="asks one thing after another")
            try:
                yield self.outcomes
            finally:
                going = False

    async def ask(self) -> None:
        """One request, compared."""
        at = next(self._numbers) % len(self._prompts)
        try:
            found = await answer(self._http, self._prompts[at], TOKENS)
            exact = found.tokens == self._whole[at].tokens
            self.outcomes.answers += 1
            self.outcomes.exact += exact
            self.outcomes.tokens += TOKENS
            if not exact:
                await self._look_closer(at, found.tokens)
        except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
            self.outcomes.gone.append(repr(error)[:500])

    async def _look_closer(self, at: int, tokens: list[int]) -> None:
        """Where it differs for the first time, and from there on again with the reference's token in its
        place."""
        whole, begun = self._whole[at], 0
        while True:
            apart = next(
                (place for place in range(begun, TOKENS) if tokens[place - begun] != whole.tokens[place]),
                None,
            )
            if apart is None:
                return
            if whole.margins[apart] > MARGIN:
                self.outcomes.wrong.append(
                    f"prompt {at}, token {apart}: {tokens[apart - begun]}, not {whole.tokens[apart]}; margin"
                    f" {whole.margins[apart]:.4f}"
                )
                return
            self.outcomes.misses += 1
            begun = apart + 1
            if begun == TOKENS:
                return
            tokens = (
                await answer(self._http, self._prompts[at] + whole.tokens[:begun], TOKENS - begun)
            ).tokens


class Movers:
    """Have experts of engines moved, one plan after another, while the context lasts."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.committed = 0
        """handovers"""
        self.ends: list[Ended] = []

    async def move(self, engine: str, dice: np.random.Generator, handovers: int) -> Ended:
        """Carry a plan out, and see how it ends."""
        plan = await self.begin(engine, dice, handovers)
        return await self.end(engine, plan)

    async def begin(self, engine: str, dice: np.random.Generator, handovers: int) -> Plan:
        plan = series(self.records.history(engine).latest, dice, handovers)
        await self.records.order(engine, plan)
        return plan

    async def end(self, engine: str, plan: Plan) -> Ended:
        history = self.records.history(engine)
        end = await until(
            lambda: history.end_of(plan.id),
            lambda: f"an end of {plan.id} of {engine}: {history.of(plan.id)}",
            60,
        )
        self.committed += sum(isinstance(one, MigrationCommitted) for one in history.of(plan.id))
        self.ends.append(end)
        return end

    async def served(self, engine: str) -> list[int]:
        """The epoch of each rank of an engine's present life; empty while any does not answer."""
        joined = self.records.history(engine).joins[-1]
        found = []
        for rank in range(len(joined.urls)):
            try:
                answer = await self.records.bus.request(
                    self.records.subjects.handover(engine, joined.worker_id, rank),
                    DescribeHandover(worker_id=joined.worker_id, rank=rank),
                    1.0,
                )
            except Exception:  # noqa: BLE001 whatever it is, it does not answer
                return []
            if isinstance(answer, HandoverDescribed) and (
                answer.state,
                answer.quarantined,
                answer.draining,
            ) == (
                "serving",
                0,
                0,
            ):
                found.append(answer.served)
        return found if len(found) == len(joined.urls) else []


@asynccontextmanager
async def clients_and_movers(fleet: Fleet) -> AsyncIterator[tuple[Clients, Movers]]:
    """Of a running fleet."""
    subjects, config = Subjects("roost"), fleet.bus_config(reconnect_max_seconds=0.2)
    bus = await NatsBus.connect(fleet.nats, subjects, config, name="mover")
    try:
        records = Records(bus, subjects)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            alongside(records.follow(), "reads what is stored"),
            aiohttp.ClientSession(
                fleet.router, timeout=aiohttp.ClientTimeout(total=60), connector=connector
            ) as http,
        ):
            yield Clients(http), Movers(records)
    finally:
        await bus.close()
