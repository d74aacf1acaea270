"""Cost of the dashboard: processor time of the router per second and page, and the time to a first view.

A router with 8, 64 and 512 known ranks decides 50 requests a second, so that every view changes every second.
The cost is the process's processor time while pages read the feed minus that of the same seconds without
pages, in turns, on the event loop that serves requests; on a busy machine that difference varies by
milliseconds. So the views are also timed alone: each is computed and encoded once a second for all pages
together, which is nearly all that a page costs. There is no planner and no tracker, so views of them show the
router's part. The first view is the time from opening the page in
Chromium to the first row of its table; without a Chromium it is left out, and said so. The router and the
browser share this machine.

    python -m benchmarks.dashboard --quick
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import aiohttp
import msgspec
import numpy as np
import typer

from benchmarks.rig.decisions import OUTPUT, Prompts, Roost, clusters, prompts, tables
from benchmarks.rig.live.browser import missing, open_browser
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from deploy.parts.router import http_limits
from router.api.app import create_app
from router.dashboard.decisions_topic import DecisionsTopic
from router.dashboard.experts_topic import ExpertsTopic
from router.dashboard.fleet_topic import FleetTopic
from router.dashboard.layouts_topic import LayoutsTopic
from router.dashboard.loop_topic import LoopTopic
from router.dashboard.routes import TOPICS
from router.http.server_sent_events import written

FLEETS = (8, 64, 512)
"""ranks"""
LIMIT_MS, FIRST_VIEW_SECONDS = 10.0, 1.0
RATE = 50.0
"""decisions per second"""
PROMPT = 1024
VIEWS = 100
"""times that each view is timed alone"""


class Pages(NamedTuple):
    """Pages that were open, and what they got."""

    bytes_per_second: float
    ms_per_second: float
    """processor time of the process, minus that without pages"""


@contextlib.asynccontextmanager
async def serving(roost: Roost) -> AsyncIterator[str]:
    """Serve a router's application on this machine; its requests are decisions without answers."""
    config = roost.router.config
    listener = listen("127.0.0.1", 0)
    async with HttpServer(
        create_app(roost.router), listener, drain_seconds=1, limits=http_limits(config), count=lambda _: None
    ):
        yield url_of(listener)


async def deciding(roost: Roost, asked: Prompts) -> None:
    """Decide RATE requests a second until cancelled."""
    at = 0
    while True:
        roost.decide(asked.ids[at % len(asked.ids)])
        at += 1
        await asyncio.sleep(1.0 / RATE)


async def reading(url: str, topics: tuple[str, ...], got: list[int]) -> None:
    """Read the feed as a page does, until cancelled; count the bytes."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{url}/dashboard/feed?topics={','.join(topics)}") as answer,
    ):
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            got[0] += len(piece)


async def spent(seconds: float) -> float:
    """Return the processor time that this process takes in these seconds."""
    before = time.process_time()
    await asyncio.sleep(seconds)
    return time.process_time() - before


async def measured(url: str, topics: tuple[str, ...], pages: int, seconds: float, rounds: int) -> Pages:
    """Compare seconds with pages to seconds without, in turns."""
    extra, got = [], [0]
    for _ in range(rounds):
        without = await spent(seconds)
        readers = [asyncio.create_task(reading(url, topics, got)) for _ in range(pages)]
        try:
            await asyncio.sleep(1.0)  # the pages are open, and have their first view
            extra.append(await spent(seconds) - without)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    return Pages(got[0] / rounds / (seconds + 1.0) / pages, 1000.0 * median(extra) / seconds)


def views(roost: Roost, asked: Prompts) -> Iterator[tuple[str, float]]:
    """Yield the topics with the milliseconds of processor time of a view after a decision, encoded."""
    service = roost.router
    for topic in (
        kind(service) for kind in (FleetTopic, DecisionsTopic, ExpertsTopic, LoopTopic, LayoutsTopic)
    ):
        spent = []
        for at in range(VIEWS):
            roost.decide(asked.ids[at % len(asked.ids)])
            began = time.thread_time()
            written(topic.name, msgspec.json.encode(topic.view()))
            spent.append(1000.0 * (time.thread_time() - began))
        yield topic.name, median(spent)


async def first_views(url: str, times: int) -> list[float]:
    """Return the seconds from opening the page to the first row of its table, each in a new profile."""
    found = []
    async with open_browser() as browser:
        for _ in range(times):
            page = await (await browser.new_context()).new_page()
            began = time.perf_counter()
            await page.goto(f"{url}/dashboard")
            await page.wait_for_selector("tbody th")
            found.append(time.perf_counter() - began)
            await page.context.close()
    return found


async def fleet(report: Report, ranks: int, *, quick: bool) -> None:
    """Measure one size of fleet, and add its rows and targets."""
    chance = np.random.default_rng(1)
    asked = prompts(chance, PROMPT, 0.0, 64)
    model = clusters(chance)
    roost = Roost(ranks, model, tables(chance, [asked]))
    seconds, rounds = (1.0, 3) if quick else (10.0, 7)
    async with serving(roost) as url:
        alone = dict(views(roost, asked))
        if ranks == max(FLEETS):
            label = f"{ranks} ranks: views of all topics, computed and encoded once"
            report.targets.append(Target(label, sum(alone.values()), LIMIT_MS, at_least=False, unit=" ms"))
        load = asyncio.create_task(deciding(roost, asked))
        try:
            for topics in (*((topic,) for topic in TOPICS), TOPICS):
                for pages in (1, 8) if topics is TOPICS else (1,):
                    cost = await measured(url, topics, pages, seconds, rounds)
                    each = cost.ms_per_second / pages
                    name = "all topics" if topics is TOPICS else topics[0]
                    view = sum(alone[topic] for topic in topics)
                    report.add(
                        ranks, name, pages, view, cost.bytes_per_second / 1024, cost.ms_per_second, each
                    )
                    if ranks == max(FLEETS):
                        report.targets.append(
                            Target(
                                f"{name}, {pages} page{'s' * (pages > 1)}: processor per second and page",
                                each,
                                LIMIT_MS,
                                at_least=False,
                                unit=" ms",
                            )
                        )
            await _view(report, url, ranks, quick=quick)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def _view(report: Report, url: str, ranks: int, *, quick: bool) -> None:
    if reason := missing():
        report.notes.append(f"no first view: {reason}")
        return
    seconds = median(await first_views(url, 3 if quick else 9))
    report.targets.append(
        Target(f"{ranks} ranks: first view", seconds, FIRST_VIEW_SECONDS, at_least=False, unit=" s")
    )


async def measure(report: Report, *, quick: bool) -> None:
    for ranks in (max(FLEETS),) if quick else FLEETS:
        await fleet(report, ranks, quick=quick)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure what the dashboard costs a router."""
    report = Report(
        f"the dashboard, at {RATE:g} decisions a second of {PROMPT} prompt tokens and {OUTPUT} of output",
        ("ranks", "topics", "pages", "a view, ms", "KiB/s per page", "ms/s, all pages", "ms/s per page"),
    )
    asyncio.run(measure(report, quick=quick))
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
