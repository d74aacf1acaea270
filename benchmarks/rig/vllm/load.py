"""The same greedy requests in the same order for every arm, at a fixed concurrency; answers are kept, so that
arms can be compared token by token.

The first half of the requests comes from one group of domains, the second half from the others: one change of
traffic in the middle.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import aiohttp

from benchmarks.rig.live.document_traffic import Request, Texts

PATIENCE_SECONDS = 300.0


class Plenty(NamedTuple):
    """Load of a run."""

    count: int
    concurrency: int
    prompt: int
    """tokens"""
    output: int
    """tokens"""


class Answer(NamedTuple):
    """Answer to one request; seconds by the monotonic clock."""

    text: str
    sent: float
    ended: float
    completion_tokens: int


def halves(traffic: Texts) -> tuple[list[str], list[str]]:
    """Split the domains into two groups, by name: code, markup and English against the other languages with
    the demo model's documents."""
    names = traffic.domains
    middle = (len(names) + 1) // 2
    return names[:middle], names[middle:]


def requests(traffic: Texts, much: Plenty, seed: int) -> list[Request]:
    """Return all requests of a run: windows of documents, a second group of domains from the middle on."""
    first, second = halves(traffic)
    begin = islice(traffic.some(first).requests(much.prompt, seed, 0), much.count // 2)
    end = islice(traffic.some(second).requests(much.prompt, seed, 0), much.count - much.count // 2)
    return [*begin, *end]


async def send(url: str, model: str, several: Sequence[Request], much: Plenty) -> list[Answer]:
    """Send the requests in their order; return the answers in the same order. Raises RuntimeError at the
    first one that is not answered."""
    answers: list[Answer | None] = [None] * len(several)
    numbers = iter(range(len(several)))

    async def client(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            answers[number] = await _ask(http, model, several[number], much.output)

    async with (
        aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS),
        ) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(much.concurrency):
            tasks.create_task(client(http))
    return [answer for answer in answers if answer is not None]


async def _ask(http: aiohttp.ClientSession, model: str, request: Request, output: int) -> Answer:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
    }
    sent = time.monotonic()
    async with http.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} from {http._base_url}: {(await answer.text())[:500]}")
        found = await answer.json()
    return Answer(found["choices"][0]["text"], sent, time.monotonic(), found["usage"]["completion_tokens"])
