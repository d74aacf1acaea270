"""Load of a simulated fleet for the tests of the dashboard, and the figures that its pages are compared with."""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.fleets import Fleet

USERS = 8
TOPICS = ("the old bridge", "packages of Debian", "ducks on a pond", "Rome", "generators", "lentils")
LOAD = ("sequences", "prefill_tokens", "steps", "blocks")
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
SECRET = "pomegranate"
"""a word of every prompt"""


# What the dashboard is compared with


def get(fleet: Fleet, path: str) -> Any:
    answer = httpx.get(fleet.router + path, trust_env=False, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def live_ranks(fleet: Fleet) -> int:
    engines = get(fleet, "/v1/status")["engines"]
    return sum(rank["state"] == "live" for engine in engines for rank in engine["ranks"])


def samples(fleet: Fleet, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a metric of the router by the values of their labels, in the order of the labels' names."""
    text = httpx.get(f"{fleet.router}/metrics", trust_env=False, timeout=30).text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def loads(fleet: Fleet) -> dict[tuple[str, str], tuple[int, ...]]:
    """By engine and rank: requests, prompt tokens to compute, tokens to emit, KV blocks, of `/metrics`."""
    names = {engine["worker_id"]: engine["engine"] for engine in get(fleet, "/v1/status")["engines"]}
    columns = [samples(fleet, f"roost_router_rank_{name}") for name in LOAD]
    return {
        (names[worker], rank): tuple(int(column[rank, model, worker]) for column in columns)
        for rank, model, worker in columns[0]
    }


def number(text: str) -> float:
    """Return the figure of a text such as "1,234", "24.5 k", "12.3 %", "1.25 s", "+40.0 ms" or "144 KiB"."""
    found = re.match(rf"([+{MINUS}-]?)([\d,]*\.?\d+)(?: ?(k|M|G|%|s|KiB|MiB)(?!\w))?", text)
    assert found is not None, text
    sign, figure, unit = found.groups()
    size = {"k": 1e3, "M": 1e6, "G": 1e9, "%": 0.01, "s": 1e3, "KiB": 2**10, "MiB": 2**20}.get(unit, 1.0)
    return (-1.0 if sign in (MINUS, "-") else 1.0) * float(figure.replace(",", "")) * size


def shows(text: str, value: float) -> bool:
    """True if a figure of three significant digits stands for a value."""
    return number(text) == pytest.approx(value, rel=0.006, abs=0.006)


# Users


def asked(chance: random.Random) -> list[dict[str, str]]:
    """A conversation's first messages: a topic's common beginning, then words of its own."""
    topic = chance.choice(TOPICS)
    common = f"You are a careful assistant for questions about {topic} and {SECRET}s. " * 12
    return [{"role": "system", "content": common}, {"role": "user", "content": f"Why {chance.random()}?"}]


async def user(fleet: Fleet, http: aiohttp.ClientSession, seed: int, answered: asyncio.Event) -> None:
    """Ask one question after another until cancelled; each answer must be good."""
    chance = random.Random(seed)
    for _ in count():
        body = {"model": "demo", "max_tokens": 80, "messages": asked(chance)}
        async with http.post(f"{fleet.router}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        answered.set()


@contextlib.asynccontextmanager
async def load(fleet: Fleet) -> AsyncIterator[None]:
    """Users while the context lasts, and from the first answers on."""
    async with aiohttp.ClientSession() as http:
        answered = [asyncio.Event() for _ in range(USERS)]
        users = [asyncio.create_task(user(fleet, http, seed, first)) for seed, first in enumerate(answered)]
        try:
            await asyncio.wait_for(asyncio.gather(*(first.wait() for first in answered)), 60.0)
            yield
            failed = [task for task in users if task.done()]
            assert not failed, failed[0].exception()
        finally:
            for task in users:
                task.cancel()
            await asyncio.gather(*users, return_exceptions=True)


@contextlib.contextmanager
def reservations(fleet: Fleet, number: int) -> Iterator[None]:
    """Load that does not move: places at ranks which another data plane has reserved."""
    chance, taken = random.Random(17), []
    try:
        for _ in range(number):
            answer = fleet.http.post("/v1/route/reserve", json={"model": "demo", "messages": asked(chance)})
            assert answer.status_code == 200, answer.text
            taken.append(answer.json()["id"])
        yield
    finally:
        for one in taken:
            assert fleet.http.post("/v1/route/release", json={"id": one}).status_code == 200
