"""`roost top`: a screen that is drawn anew, lines where there is none, JSON for programs; and nothing of it
stays."""

import asyncio
import io
import json
import math
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from bus import Bus, Message
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client import control_loop
from deploy.views import top
from deploy.views.top import FleetWatch, JsonPage, Page, TextPage, clock, keys, page
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineJoined
from fleet.requests.control_loop import LoopDescribed, SetLoopState
from tests.deploy.bus_responder import on_nats
from tests.deploy.commands import roost
from tests.deploy.loop_figures import ENGINE, NOW, loop
from tests.deploy.views.test_live_state import COMMITTED, JOINED, PLANNED, measured

SUBJECTS = Subjects()


async def here(message: Message) -> LoopDescribed:
    return loop(ENGINE, paused=isinstance(message, SetLoopState) and message.paused)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(broker)
    await bus.record(SUBJECTS.membership("engine-0"), JOINED)
    yield bus
    await bus.close()


@asynccontextmanager
async def watching(bus: Bus) -> AsyncIterator[FleetWatch]:
    """With an engine that speaks and a planner that answers."""
    watch = FleetWatch(bus, SUBJECTS, "NATS somewhere")
    async with asyncio.timeout(10), bus.serve(SUBJECTS.loop, here), watch.following(0.01):
        await bus.publisher(SUBJECTS.heartbeats("engine-0")).publish(
            EngineHeartbeat(engine="engine-0", worker_id=7, epoch=4)
        )
        for rank in range(2):
            await bus.publisher(SUBJECTS.kv_metrics).publish(KvMetrics(worker_id=7, dp_rank=rank, running=3))
        await until(
            watch,
            lambda: (
                all(one.complete for one in watch.live.engines.values())
                and isinstance(watch.loop, LoopDescribed)
            ),
        )
        yield watch


async def until(watch: FleetWatch, holds: Callable[[], Any]) -> None:
    while not holds():  # noqa: ASYNC110 what is waited for has no event
        await asyncio.sleep(0)


def plain(watch: FleetWatch, height: int = 40) -> list[str]:
    return [line.plain for line in page(watch, NOW, height)]


async def test_the_page_shows_engines_the_loop_and_what_happens(bus: MemoryBus) -> None:
    await bus.record(SUBJECTS.migrations("engine-0"), PLANNED)
    async with watching(bus) as watch:
        assert watch.live.engines["engine-0"].migrating == "cafe", "the past is known"
        await bus.record(SUBJECTS.migrations("engine-0"), COMMITTED)
        await bus.publisher(SUBJECTS.dispatched("engine-0")).publish(measured())
        await until(watch, watch.live.figures)
        output = plain(watch)
        assert len(output) <= 40
        for words in (
            "tokens/s",
            "engine-0: m, epoch 4",
            "last 10 s",
            "discount 0.85",
            "plan cafe of the planner begins",
            "plan cafe is done",
        ):
            assert any(words in line for line in output), words
        assert "being carried out" not in "\n".join(output)


@pytest.mark.parametrize("height", [3, 10, 24, 40, 60])
async def test_the_page_is_never_longer_than_the_window(bus: MemoryBus, height: int) -> None:
    async with watching(bus) as watch:
        for number in range(60):
            await bus.record(SUBJECTS.migrations("engine-0"), COMMITTED if number % 2 else PLANNED)
        await until(watch, lambda: watch.live.happened > 60)
        assert len(plain(watch, height)) <= height
        assert len(plain(watch, 60)) == 60, "what is left is filled with what happened"


async def test_a_planner_that_is_gone_is_said_and_measurements_go_on(bus: MemoryBus) -> None:
    async with asyncio.timeout(10), watching(bus) as watch:
        watch.loop = top.NoAnswer("nobody is there")
        await bus.publisher(SUBJECTS.dispatched("engine-0")).publish(measured())
        await until(watch, watch.live.figures)
        watch.loop = top.NoAnswer("nobody is there")
        output = plain(watch)
        assert any("nobody is there" in line for line in output)
        assert any(line.startswith("served locally") for line in output)


async def test_pages_of_text_and_json_tell_an_event_once(
    bus: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    text: Page = TextPage()
    programs: Page = JsonPage()
    async with watching(bus) as watch:
        await bus.record(SUBJECTS.migrations("engine-0"), PLANNED)
        await until(watch, lambda: watch.live.happened >= 2)
        text.show(watch)
        assert "plan cafe of the planner begins" in capsys.readouterr().out
        text.show(watch)
        assert "plan cafe of the planner" not in capsys.readouterr().out
        programs.show(watch)
        programs.show(watch)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["loop"]["engines"][0]["plan_discount"] == 0.85
    assert first["engines"][0]["ranks"][1]["running"] == 3
    assert [one["kind"] for one in first["events"]] == ["EngineJoined", "MigrationPlanned"]
    assert second["events"] == []


async def test_without_a_bus_for_a_while_it_says_so_and_goes_on(
    broker: MemoryBroker, bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "ASK_SECONDS", 0.05)
    async with watching(bus) as watch:
        broker.reachable = False
        await until(watch, lambda: isinstance(watch.loop, top.NoAnswer))
        broker.reachable = True
        await until(watch, lambda: isinstance(watch.loop, LoopDescribed))


async def test_nothing_stale_is_shown_as_new(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(bus) as watch:
        monkeypatch.setattr(watch.live, "apply", lambda received, now: 1 / 0)
        await bus.record(SUBJECTS.migrations("engine-0"), PLANNED)
        with pytest.raises(ZeroDivisionError):
            await until(watch, watch.check)


def test_a_clock_that_says_nonsense_is_shown_as_none() -> None:
    assert [clock(at) for at in (math.nan, -1.0, 1e300)] == ["--:--:--"] * 3


# The terminal


async def test_q_ends_it_and_the_terminal_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        before, ended = termios.tcgetattr(theirs), asyncio.Event()
        with keys(ended):
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
            os.write(ours, b"x")
            os.write(ours, b"q")
            async with asyncio.timeout(5):
                await ended.wait()
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


async def test_the_screen_is_a_page_of_its_own_also_when_something_fails(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=80, height=24)
    async with watching(bus) as watch:
        with top.on_screen(console, asyncio.Event()) as screen:
            screen.show(watch)
        with pytest.raises(ZeroDivisionError), top.on_screen(console, asyncio.Event()):
            _ = 1 / 0
    output = drawn.getvalue()
    assert "engine-0: m, epoch 4" in output
    assert output.index("\x1b[?1049h") < output.index("engine-0") < output.index("\x1b[?1049l")
    assert output.count("\x1b[?1049h") == output.count("\x1b[?1049l") == 2
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 2


# As commands


@pytest.mark.usefixtures("elsewhere")
def test_the_loop_is_watched_paused_and_resumed_from_the_command_line(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOST_BUS_NAMESPACE", "watched")
    monkeypatch.setattr(top, "LISTEN_SECONDS", 0.5)  # a busy machine answers late
    monkeypatch.setattr("deploy.client.fleet_status.LISTEN_SECONDS", 0.5)

    @asynccontextmanager
    async def serving(bus: Bus, subjects: Subjects) -> AsyncIterator[None]:
        await bus.record(
            subjects.membership("engine-0"),
            EngineJoined(**{name: getattr(JOINED, name) for name in JOINED.__struct_fields__}),
        )
        async with bus.serve(subjects.loop, here):
            yield

    with on_nats(nats_url, "watched", serving):
        found = json.loads(roost("top", "--once", "--json", "--nats", nats_url).stdout)
        assert found["loop"]["engines"][0]["engine"] == "engine-0"
        assert "loop: automatic" in roost("top", "--once", "--nats", nats_url).stdout
        answer = roost("status", "engine-0", "--nats", nats_url)
        assert "discount 0.85" in answer.stdout
        assert (
            "no engine 'engine-9'; there are: engine-0"
            in roost("status", "engine-9", "--nats", nats_url).stderr
        )
        assert (
            json.loads(roost("status", "--json", "--nats", nats_url).stdout)["loop"]["engines"][0][
                "spent_bytes"
            ]
            == 12_300_000
        )
        paused = roost("migration", "pause", "--reason", "new fan", "--nats", nats_url)
        assert paused.exit_code == 0
        assert "PAUSED" in paused.stdout
        assert (
            "the planner starts no plan and undoes none. Commands of operators are carried out"
            in " ".join(paused.stdout.split())
        )
        assert json.loads(roost("migration", "pause", "--json", "--nats", nats_url).stdout)["paused"] is True
        assert "loop: automatic" in roost("migration", "resume", "--nats", nats_url).stdout
        assert "loop: automatic" in roost("migration", "status", "--nats", nats_url).stdout
