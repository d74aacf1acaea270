"""Closed load of streamed completions on the router: a fixed concurrency, requests in the order of one list;
times to the first token, and lost requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from benchmarks.rig.live.document_traffic import Request

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds by the monotonic clock."""

    domain: str
    sent: float
    first: float
    """time of its first token"""
    ended: float
    tokens: int
    """output tokens"""


@dataclass
class Load:
    """Results of a load so far. `number` of a request counts the sent ones."""

    answered: list[Answered] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    sent: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_sent(self, count: int) -> None:
        """Return once `count` requests were sent."""
        while self.sent < count:
            self._more.clear()
            await self._more.wait()

    def one_more(self) -> None:
        self.sent += 1
        self._more.set()


class Lengths(NamedTuple):
    """Answer lengths in tokens: `mean`, with a relative deviation of up to `vary`."""

    mean: int
    vary: float = 0.0

    def of(self, request: Request) -> int:
        return max(1, round(self.mean * (1.0 + self.vary * request.stray)))

    def __str__(self) -> str:
        return (
            f"{self.mean}"
            if not self.vary
            else f"{self.mean * (1 - self.vary):.0f} to {self.mean * (1 + self.vary):.0f}"
        )


class Asker:
    """Client that sends greedy completions of token ids with a given answer length."""

    def __init__(self, http: aiohttp.ClientSession, model: str, lengths: Lengths) -> None:
        self._http = http
        self._model = model
        self._lengths = lengths

    def body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }

    async def ask(self, request: Request, load: Load) -> None:
        """Send one request. An incomplete answer counts as lost, and is logged."""
        load.one_more()
        tokens = self._lengths.of(request)
        sent, first, text = time.monotonic(), 0.0, bytearray()
        try:
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                self._http.post("/v1/completions", json=self.body(request.prompt, tokens)) as answer,
            ):
                async for chunk in answer.content.iter_any():
                    first = first or time.monotonic()
                    text += chunk
                if answer.status != 200 or b"data: [DONE]" not in text or b'"error"' in text:
                    load.lost.append(f"{answer.status}: {text[-300:].decode(errors='replace')}")
                    return
        except (aiohttp.ClientError, TimeoutError) as error:
            load.lost.append(repr(error)[:300])
            return
        load.answered.append(Answered(request.domain, sent, first, time.monotonic(), tokens))


@asynccontextmanager
async def asking(
    router: str, model: str, requests: Iterator[Request], concurrency: int, output: Lengths
) -> AsyncIterator[Load]:
    """Run `concurrency` clients while the context lasts, or until there is no further request; started
    requests are completed before it ends."""
    load, going = Load(), True

    async def client(asker: Asker) -> None:
        while going and (request := next(requests, None)) is not None:
            await asker.ask(request, load)
            if load.lost and not load.answered and len(load.lost) > concurrency:
                raise RuntimeError(f"nothing is answered: {load.lost[-1]}")

    async with (
        aiohttp.ClientSession(router, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(concurrency):
            tasks.create_task(
                client(Asker(http, model, output)), name=f"client {number} asks one thing after another"
            )
        try:
            yield load
        finally:
            going = False
