"""`roost top`: live `roost status`. A screen redrawn every second, lines of text without a terminal, or
JSON."""

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live as LiveScreen
from rich.text import Text

from bus import Bus, BusError, Received, Subscription
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.control_loop import NoAnswer
from deploy.client.fleet_status import LISTEN_SECONDS, as_record, members, note_plans
from deploy.process import alongside
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import in_json, show
from deploy.views.live_state import EventLine, LiveState
from deploy.views.status import Loop, fitting, loop_of, loop_record

PAST_SECONDS = 600.0
"""age of past events shown at the start"""
MEMBERS_SECONDS = 10.0
"""interval of membership reads from the log, in case a message was missed"""
MIN_EVENTS = 5
"""screen lines reserved for events"""
_LAST = 2.0**34
"""Unix seconds of the year 2514"""
_KEYS = 64
"""keys read at a time"""
MORE = "... a larger window shows the rest"


class Page(Protocol):
    """Display that is redrawn at every update."""

    def show(self, watch: "FleetWatch") -> None: ...


class FleetWatch:
    """Fleet state, kept fresh over the bus."""

    def __init__(self, bus: Bus, subjects: Subjects, where: str) -> None:
        self._bus, self._subjects = bus, subjects
        self._clock = asyncio.get_running_loop().time
        self.where = where
        self.live = LiveState(self._clock())
        self.loop: Loop = NoAnswer("the planner has not been queried yet")
        self.missed = 0
        """messages dropped because they came faster than they were read"""
        self.updated = asyncio.Event()
        """set with every message"""
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @asynccontextmanager
    async def following(self, interval: float) -> AsyncIterator[None]:
        """Subscribe while the context lasts, after loading the stored messages. Raises BusError without a
        bus."""
        names = self._subjects
        live = (
            names.heartbeats(),
            names.kv_metrics,
            names.dispatched(),
            names.shifts,
            names.homes,
            *names.stored,
        )
        async with self._bus.subscribe(*live) as messages:
            known = await self._past()
            await self._read_members()
            async with (
                alongside(self._listen(messages, known), "follow the fleet's messages") as listening,
                alongside(self._query_planner(interval), "query the planner") as asking,
                alongside(self._refresh_members(), "read the members from the log") as refreshing,
            ):
                self._tasks = (listening, asking, refreshing)
                yield

    async def _past(self) -> set[tuple[int, int]]:
        """Apply recent events in order. Returns the identities of the stored messages."""
        past = [
            one
            for subject in self._subjects.stored
            async for one in self._bus.replay(subject, since=PAST_SECONDS, follow=False)
        ]
        for one in sorted(past, key=lambda one: one.published_at):
            self.live.record_event(one)
        return {_identity(one) for one in past}

    async def _listen(self, messages: Subscription, known: set[tuple[int, int]]) -> None:
        async for received in messages:
            if _identity(received) not in known:
                self.live.apply(received, self._clock())
            self.missed = messages.dropped
            self.updated.set()

    async def _query_planner(self, interval: float) -> None:
        while True:
            self.loop = await loop_of(self._bus, self._subjects)
            await asyncio.sleep(interval)

    async def _refresh_members(self) -> None:
        while True:
            await asyncio.sleep(MEMBERS_SECONDS)
            try:
                await self._read_members()
            except BusError as error:
                self.loop = NoAnswer(str(error))

    async def _read_members(self) -> None:
        engines = await members(self._bus, self._subjects)
        await note_plans(self._bus, self._subjects, engines)
        self.live.set_members(engines)

    def check(self) -> None:
        """Drop outdated data. Raises the error of a background task that ended, so that stale data is never
        shown as new."""
        for task in self._tasks:
            if task.done():
                task.result()
        self.live.drop_outdated(self._clock())

    @property
    def tokens_per_second(self) -> float:
        return self.live.tokens_per_second(self._clock())


def _identity(received: Received) -> tuple[int, int]:
    return received.publisher_id, received.sequence


# Content


def page(watch: FleetWatch, now: float, height: int) -> list[Text]:
    """Return a screen: the fleet, the loop, and the last events, newest last. now: Unix seconds."""
    live = watch.live
    missed = f", {watch.missed} messages missed" if watch.missed else ""
    head = Text(
        f"roost top {clock(now)}  {watch.where}  {watch.tokens_per_second:,.0f} tokens/s{missed}  (q ends)",
        "reverse",
    )
    room = max(height - 2 - MIN_EVENTS, 1)
    body = fitting(list(live.engines.values()), watch.loop, now, room, live.figures())
    if not live.engines:
        body.insert(0, Text("no engine has joined"))
    if len(body) > room:
        body = [*body[: room - 1], Text(MORE, "dim")]
    left = max(height - 2 - len(body), 0)
    return [head, *body, Text("-" * 80, "dim"), *happened(list(live.events)[-left:] if left else [])]


def happened(events: Sequence[EventLine]) -> list[Text]:
    """Return one line per event."""
    return [Text(f"{clock(one.at)} {one.words}") for one in events]


def clock(at: float) -> str:
    """Format Unix seconds as time of day, if they are valid: other machines' clocks may report any value."""
    return time.strftime("%H:%M:%S", time.localtime(at)) if 0 <= at < _LAST else "--:--:--"


class ScreenPage:
    """The terminal's alternate screen, which leaves no trace."""

    def __init__(self, console: Console, screen: LiveScreen) -> None:
        self._console, self._screen = console, screen

    def show(self, watch: FleetWatch) -> None:
        lines = page(watch, time.time(), self._console.size.height)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._screen.update(Group(*lines), refresh=True)


class PageSequence:
    """Pages that are printed one after another. Each event is on one page only."""

    def __init__(self) -> None:
        self._printed = 0

    def new_events(self, live: LiveState) -> list[EventLine]:
        """Return the events since the page before, as far as they are kept."""
        new, self._printed = live.happened - self._printed, live.happened
        return list(live.events)[-new:] if new else []


class TextPage(PageSequence):
    """Text."""

    def show(self, watch: FleetWatch) -> None:
        now, live = time.time(), watch.live
        body = fitting(list(live.engines.values()), watch.loop, now, sys.maxsize, live.figures())
        head = Text(
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}  {watch.where} "
            f" {watch.tokens_per_second:,.0f} tokens/s"
        )
        show("\n".join(line.plain for line in [head, *body, *happened(self.new_events(live))]) + "\n")


class JsonPage(PageSequence):
    """One JSON object per update."""

    def show(self, watch: FleetWatch) -> None:
        measured = watch.live.figures()
        record = {
            "at": time.time(),
            "tokens_per_second": watch.tokens_per_second,
            "missed": watch.missed,
            "engines": [
                {**as_record(one), "measured": measured.get(name)} for name, one in watch.live.engines.items()
            ],
            **loop_record(watch.loop),
            "events": [one._asdict() for one in self.new_events(watch.live)],
        }
        show(in_json(record))


# Running


def show_top(bus_config: BusConfig, interval: float, *, once: bool, as_json: bool) -> None:
    """Show the fleet every `interval` seconds until q or Ctrl-C; once: a single time."""
    console = Console(highlight=False)
    where = f"NATS {bus_config.where}"

    async def work(bus: Bus, subjects: Subjects) -> None:
        watch = FleetWatch(bus, subjects, where)
        ended = asyncio.Event()
        async with watch.following(interval):
            await _first_interval(watch)
            with ExitStack() as stack:
                await _turns(
                    watch,
                    stack.enter_context(_page_for(console, ended, as_json=as_json, once=once)),
                    ended,
                    interval,
                    once=once,
                )

    on_bus(bus_config, work)


async def _first_interval(watch: FleetWatch) -> None:
    """Wait until the first page covers one interval of heartbeats and load reports."""
    try:
        async with asyncio.timeout(LISTEN_SECONDS):
            while not (watch.live.engines and all(one.complete for one in watch.live.engines.values())):
                watch.updated.clear()
                await watch.updated.wait()
    except TimeoutError:
        pass  # engines without a message are shown as silent


async def _turns(
    watch: FleetWatch, shown: Page, ended: asyncio.Event, interval: float, *, once: bool
) -> None:
    while not ended.is_set():
        watch.check()
        shown.show(watch)
        if once:
            return
        try:
            async with asyncio.timeout(interval):
                await ended.wait()
        except TimeoutError:
            continue


def _page_for(
    console: Console, ended: asyncio.Event, *, as_json: bool, once: bool
) -> AbstractContextManager[Page]:
    """Choose the display: a screen on a terminal unless `once`, else text or JSON."""
    return (
        on_screen(console, ended)
        if console.is_terminal and not as_json and not once
        else _pages(JsonPage() if as_json else TextPage())
    )


@contextmanager
def _pages(page: Page) -> Iterator[Page]:
    yield page


@contextmanager
def on_screen(console: Console, ended: asyncio.Event) -> Iterator[Page]:
    """Draw on the alternate screen and restore the terminal in any case."""
    with (
        keys(ended),
        LiveScreen(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as screen,
    ):
        yield ScreenPage(console, screen)


@contextmanager
def keys(ended: asyncio.Event) -> Iterator[None]:
    """End at q if there is a keyboard; keys are not echoed meanwhile."""
    if not sys.stdin.isatty():
        yield
        return
    source, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(source)

    def pressed() -> None:
        letters = os.read(source, _KEYS)
        if not letters or b"q" in letters.lower():
            ended.set()

    tty.setcbreak(source)
    loop.add_reader(source, pressed)
    try:
        yield
    finally:
        loop.remove_reader(source)
        termios.tcsetattr(source, termios.TCSADRAIN, before)
