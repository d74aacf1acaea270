"""Real processes that die or fail while many requests are answered: none is lost, none is answered otherwise
than undisturbed."""

import asyncio
import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.system.fleets import Fleet, Home, leave_nothing, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
AT_ONCE = 24
PROMPTS = 48
TOKENS = 80


@pytest.fixture
def fleet(home: Home) -> Iterator[Fleet]:
    """Four simulated engines of two ranks before two router processes."""
    fleet = Fleet(home, "--engine", "simulated", "--engines", "4", "--ranks", "2", "--processes", "2")
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)
    home.state.mkdir()


def body(number: int, *, stream: bool) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"Tell story number {number} about the river and the old bridge."}
    ]
    return {"model": "demo", "seed": number, "max_tokens": TOKENS, "stream": stream, "messages": messages}


async def text_of(http: aiohttp.ClientSession, number: int, *, stream: bool) -> tuple[int, str]:
    """The status and the text of one answer; "error: ..." when it breaks off."""
    async with http.post("/v1/chat/completions", json=body(number, stream=stream)) as answer:
        if answer.status != 200:
            return answer.status, await answer.text()
        if not stream:
            return 200, (await answer.json())["choices"][0]["message"]["content"]
        pieces: list[str] = []
        async for line in answer.content:
            if line.startswith(b"data: {"):
                answer = json.loads(line[6:])
                if "error" in answer:
                    return 200, f"error: {answer['error']}"
                pieces += [choice["delta"].get("content") or "" for choice in answer["choices"]]
        return 200, "".join(pieces)


@dataclass
class Outcomes:
    """What clients got."""

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)


async def under_load(fleet: Fleet, seconds: float, disturb: Callable[[], Awaitable[None]]) -> Outcomes:
    """Ask from many clients for so long while something is disturbed, and compare each answer with the
    undisturbed one."""
    outcomes, numbers = Outcomes(), itertools.count()
    limits = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # each request may meet the other router
    async with aiohttp.ClientSession(fleet.router, timeout=limits, connector=connector) as http:
        whole = dict(
            enumerate(
                await asyncio.gather(*(text_of(http, number, stream=False) for number in range(PROMPTS)))
            )
        )
        assert {status for status, _ in whole.values()} == {200}
        assert len({text for _, text in whole.values()}) == PROMPTS
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                number = next(numbers)
                status, text = await text_of(http, number % PROMPTS, stream=bool(number % 4))
                outcomes.answers += 1
                if (status, text) != whole[number % PROMPTS]:
                    outcomes.wrong.append(f"{status} {text[:300]}")

        async def disturber() -> None:
            while time.monotonic() < end:
                await disturb()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disturber(), name="disturbs")
            for _ in range(AT_ONCE):
                tasks.create_task(client(), name="asks one request after another")
    return outcomes


def counted(fleet: Fleet, family: str) -> float:
    """A counter, over both routers."""
    routers = json.loads(next((fleet.home.state / "roost").glob("run-*/running.json")).read_text())["routers"]
    samples = [
        line.split()
        for url in routers
        for line in fleet.http.get(f"{url}/metrics").text.splitlines()
        if line.startswith(f"roost_router_{family}")
    ]
    return sum(float(value) for _, value in samples)


def test_an_engine_killed_every_five_seconds_for_half_a_minute_loses_no_request(fleet: Fleet) -> None:
    killed: list[str] = []

    async def kill() -> None:
        await asyncio.sleep(5)
        victim = f"engine-{len(killed) % 4}"
        fleet.processes()[victim].send_signal(signal.SIGKILL)
        killed.append(victim)

    outcomes = asyncio.run(under_load(fleet, 31.0, kill))
    print(  # noqa: T201
        f"{outcomes.answers} answers, {len(outcomes.wrong)} wrong, {len(killed)} kills,"
        f" {counted(fleet, 'retries_total'):.0f} retries"
    )
    assert not outcomes.wrong, outcomes.wrong[:5]
    assert len(killed) >= 5
    assert outcomes.answers > 100
    assert counted(fleet, "retries_total") > 0
    assert counted(fleet, "retries_refused_total") == 0
    until(
        lambda: len(fleet.http.post("/v1/route", json=body(0, stream=False)).json()["candidates"]) == 8,
        "all engines to be back",
        30,
    )


def test_a_tenth_of_all_forwards_failing_before_two_routers_loses_no_request(fleet: Fleet) -> None:
    urls = [
        line.split()[1]
        for line in fleet.up.output.splitlines()
        if line.strip().startswith("engine-") and "http" in line
    ]
    assert len(urls) == 4
    begun = False

    async def fail() -> None:
        nonlocal begun
        for url in urls if not begun else ():
            for fault in ("error", "break_stream"):
                order = {"fault": fault, "share": 0.05}
                assert (
                    await asyncio.to_thread(
                        fleet.http.post, f"{url}/simulate", json=order, headers=fleet.to_ranks
                    )
                ).status_code == 200
        begun = True
        await asyncio.sleep(1)

    outcomes = asyncio.run(under_load(fleet, 20.0, fail))
    retries = counted(fleet, "retries_total")
    print(f"{outcomes.answers} answers, {len(outcomes.wrong)} wrong, {retries:.0f} retries")  # noqa: T201
    assert not outcomes.wrong, outcomes.wrong[:5]
    assert outcomes.answers > 100
    assert retries > 0.05 * outcomes.answers
    assert counted(fleet, "retries_refused_total") == 0
