"""Follow the KV events of one rank over ZMQ, without a gap.

Events are numbered. A jump is closed by the publisher's replay endpoint; so are events that were published
before the agent started, or while the connection was lost. What cannot be closed is forgotten: the followed
cache is cleared, and fills again from later events.

A publisher that starts anew numbers from 0. It is recognised by its last event: a replay of the last number
that was received must return the same bytes."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.kv_blocks import Change, KvBlocks
from engine_adapter.foreign.kv_frames import UnreadableEvents, events_of
from engine_adapter.foreign.kv_source import KvSource

CHECK_SECONDS = 10.0
"""A stream without events this long is checked against the publisher: the last ones may have been lost."""
REPLAY_SECONDS = 5.0
"""Time limit of each message of a replay."""
BIND_SECONDS = 2.0
"""Time after which a publisher that is not there is expected to connect to the agent."""
_RECENT = 4096
"""Numbers whose payloads are remembered, to tell repetitions from a new start."""
_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
_MAX_PAYLOAD = 64 * 1024 * 1024
log = logging.getLogger(__name__)


class KvStream:
    """Events of one rank. `run` follows them until it is cancelled."""

    def __init__(
        self,
        name: str,
        source: KvSource,
        blocks: KvBlocks,
        report: Callable[[list[Change]], None],
        *,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """name: of the rank, for the log. report: takes the changes of the cache, in order."""
        self.connected = False
        self.lost_batches = 0
        """Batches of events that could not be had again."""
        self.unreadable = 0
        self._name = name
        self._source = source
        self._blocks = blocks
        self._report = report
        self._check_seconds = check_seconds
        self._next = 0
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._warned = {"orphans": 0, "foreign": 0}
        self._told_silent = False

    async def run(self) -> None:
        """Follow the events until cancelled. EngineFailed when the publisher starts anew: its cache is
        empty."""
        context = zmq.asyncio.Context()
        try:
            events: Any = context.socket(zmq.SUB)
            # Beyond the limit ZMQ would drop events without a word; the publisher has a limit of its own.
            events.set_hwm(0)
            events.setsockopt(zmq.MAXMSGSIZE, _MAX_PAYLOAD)
            events.subscribe(self._source.topic.encode())
            watched = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            monitor: Any = events.get_monitor_socket(watched)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(monitor), name=f"connection of the KV events of {self._name}")
                events.connect(self._source.endpoint)
                if self._source.may_connect:
                    tasks.create_task(self._let_connect(events), name=f"bind for {self._name}")
                await self._follow(context, events)
        finally:
            context.destroy(linger=0)

    async def alive(self) -> bool:
        """Return True if the publisher still answers or is still connected."""
        if self.connected or self._source.replay_endpoint is None:
            return self.connected
        context = zmq.asyncio.Context()
        try:
            return await self._replay(context, self._next) is not None
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: "zmq.asyncio.Context", events: Any) -> None:
        await self._catch_up(context)
        if self._source.replay_endpoint is None:
            log.warning(
                "%s publishes KV events without a replay endpoint: blocks cached before now, or while events"
                ' are lost, stay unknown; add "replay_endpoint" to --kv-events-config',
                self._name,
            )
        while True:
            frames = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._check_seconds):
                    frames = await events.recv_multipart()
            if frames is None:
                if not self.connected:
                    self._silent(self._source.endpoint)
                await self._catch_up(context)
            else:
                await self._received(context, frames)

    async def _received(self, context: "zmq.asyncio.Context", frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._unreadable(f"{len(frames)} frames")
            return
        number, payload = int.from_bytes(frames[1], "big", signed=True), frames[2]
        if number < self._next:
            if self._recent.get(number) == xxhash.xxh3_64_intdigest(payload):
                return  # a replay has brought it already
            if not await self._catch_up(context):
                self._started_anew()
            return
        if number > self._next:
            await self._catch_up(context)
        if number > self._next:
            self._lost(number - self._next)
        if number >= self._next:
            self._apply(number, payload)

    async def _catch_up(self, context: "zmq.asyncio.Context") -> bool:
        """Apply all events that the publisher still has and that were not received. False: it cannot be
        asked. EngineFailed when it started anew."""
        if self._source.replay_endpoint is None:
            return False
        behind = True
        while behind:
            begin = self._next
            found = await self._replay(context, max(begin - 1, 0))
            if found is None:
                self._silent(self._source.replay_endpoint)
                return False
            self._told_silent = False
            behind = self._apply_replay(found, begin)
        return True

    def _apply_replay(self, found: list[tuple[int, bytes]], begin: int) -> bool:
        """Apply the answer to a replay from the last received event on. Return True if it has a hole, so that
        the rest is to be had with another one."""
        if begin:
            last = found.pop(0) if found and found[0][0] == begin - 1 else None
            if last is None and not found:
                self._started_anew()
            if last is not None and self._recent.get(last[0], 0) not in (
                0,
                xxhash.xxh3_64_intdigest(last[1]),
            ):
                self._started_anew()
        for number, payload in found:
            if number > self._next and self._next > begin:
                return True
            if number > self._next:
                self._lost(number - self._next)
            self._apply(number, payload)
        return False

    async def _replay(self, context: "zmq.asyncio.Context", begin: int) -> list[tuple[int, bytes]] | None:
        """Return the numbered payloads that the publisher has from a number on. None: it does not answer."""
        found: list[tuple[int, bytes]] = []
        asking: Any = context.socket(zmq.DEALER)
        asking.set_hwm(0)
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.MAXMSGSIZE, _MAX_PAYLOAD)
        try:
            asking.connect(self._source.replay_endpoint)
            await asking.send_multipart([b"", begin.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_SECONDS):
                    frames = await asking.recv_multipart()
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number < 0:
                    return found
                found.append((number, frames[-1]))
        except TimeoutError:
            return None
        finally:
            asking.close(linger=0)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._recent[number] = xxhash.xxh3_64_intdigest(payload)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        try:
            changes = [change for event in events_of(payload) for change in self._blocks.apply(event)]
        except (UnreadableEvents, OverflowError) as error:
            self._unreadable(str(error))
            changes = self._blocks.clear()
        if changes:
            self._report(changes)
        self._warn_of_gaps()

    def _lost(self, batches: int) -> None:
        self.lost_batches += batches
        if self._next or self._source.replay_endpoint is not None:
            log.warning(
                "%s: %d batches of KV events are lost for good; the cache counts as empty and fills again",
                self._name,
                batches,
            )
        if self._next:
            self._report(self._blocks.clear())

    def _started_anew(self) -> None:
        raise EngineFailed(f"{self._name} has started anew: its KV events begin again")

    def _silent(self, endpoint: str) -> None:
        """Log once that nothing answers there."""
        if not self._told_silent:
            self._told_silent = True
            log.warning("%s: no publisher of KV events answers at %s", self._name, endpoint)

    def _unreadable(self, what: str) -> None:
        self.unreadable += 1
        if self.unreadable & (self.unreadable - 1) == 0:
            log.warning("%s: unreadable KV events (%d so far): %s", self._name, self.unreadable, what)

    def _warn_of_gaps(self) -> None:
        """Log the first block, and each time their number has doubled, that cannot be followed."""
        for what, reason in (("orphans", "their parent is unknown"), ("foreign", "their hash covers images")):
            count = getattr(self._blocks.counts, what)
            if count >= max(2 * self._warned[what], 1):
                self._warned[what] = count
                log.info("%s: %d cached blocks are not followed: %s", self._name, count, reason)

    async def _let_connect(self, events: Any) -> None:
        """Bind the endpoint if nothing is bound there: the publisher then connects to it."""
        await asyncio.sleep(BIND_SECONDS)
        endpoint = self._source.endpoint
        if self.connected:
            return
        if not endpoint.startswith(_LOOPBACK):
            log.warning(
                "%s publishes its KV events to %s, where nothing is bound: without a * in the endpoint the"
                ' server does not listen; use "tcp://*:PORT" in --kv-events-config',
                self._name,
                endpoint,
            )
            return
        events.disconnect(endpoint)
        try:
            events.bind(endpoint)
            log.info("%s: the server connects to %s to publish its KV events", self._name, endpoint)
        except zmq.ZMQError as error:
            events.connect(endpoint)
            log.warning("%s: %s can be neither reached nor bound: %s", self._name, endpoint, error)

    async def _watch(self, monitor: Any) -> None:
        """Log the loss and the return of the connection."""
        while True:
            found = await recv_monitor_message(monitor)
            now = found["event"] != zmq.EVENT_DISCONNECTED
            if now and not self.connected:
                log.info("%s: KV events come from %s", self._name, self._source.endpoint)
            elif self.connected and not now:
                log.warning("%s: the stream of KV events is lost; connecting again", self._name)
            self.connected = now
