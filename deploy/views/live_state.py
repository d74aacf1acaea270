"""Live state of a fleet from received messages: engines and their load, recent measurements, events. Pure."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bus import Received
from deploy.client.fleet_status import EngineNow
from deploy.views.event_lines import event_line
from fleet.facts.activity import DispatchMeasured
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.migrations import LoopFigures
from fleet.facts.placements import HomesPublished
from fleet.membership import SILENT_SECONDS, Heartbeats

LAST_SECONDS = 10.0
"""Time window of the figures."""
MAX_MEASURED = 4096
"""Most measurements kept per engine."""
MAX_EVENTS = 256
MAX_LAYERS = 4096


class EventLine(NamedTuple):
    """Event that gets a line. at: Unix seconds by the sender's clock."""

    at: float
    kind: str
    words: str


class LiveState:
    """Fold of received messages. now: seconds of a monotonic clock."""

    def __init__(self, began: float) -> None:
        self.engines: dict[str, EngineNow] = {}
        self.events: deque[EventLine] = deque(maxlen=MAX_EVENTS)
        self.happened = 0
        """events so far, including those already dropped"""
        self._began = began
        self._measured: dict[int, deque[tuple[float, DispatchMeasured]]] = {}
        self._heartbeats = Heartbeats()
        self._homes: dict[int, int] = {}

    def set_members(self, engines: Iterable[EngineNow]) -> None:
        """Set the joined engines according to the log; their measurements stay."""
        before = self.engines
        self.engines = {}
        for one in engines:
            known = before.get(one.joined.engine)
            if known is not None and known.joined.worker_id == one.joined.worker_id:
                one.heartbeat, one.load = known.heartbeat, known.load
            self.engines[one.joined.engine] = one
        self._drop_departed()

    def apply(self, received: Received, now: float) -> None:
        """Apply one message of any kind."""
        message = received.message
        self.record_event(received)
        match message:
            case EngineJoined():
                self.engines[message.engine] = EngineNow(message)
                self._drop_departed()
            case EngineLeft():
                self._leave(message)
            case HomesPublished():
                self._homes[message.worker_id] = message.version
            case _:
                self._note(received, now)

    def record_event(self, received: Received) -> None:
        """Record the event only; its message changes no state."""
        line = event_line(received.message, self._homes)
        if line is not None:
            self.happened += 1
            self.events.append(EventLine(received.published_at, type(received.message).__name__, line))

    def _leave(self, message: EngineLeft) -> None:
        known = self.engines.get(message.engine)
        if known is not None and known.joined.worker_id == message.worker_id:
            del self.engines[message.engine]
            self._drop_departed()

    def _note(self, received: Received, now: float) -> None:
        """Apply a message about a known engine."""
        message = received.message
        engine = self._worker(getattr(message, "worker_id", None))
        if engine is None:
            return
        engine.apply(message)
        match message:
            case EngineHeartbeat():
                self._heartbeats.beat(message.worker_id, now)
            case DispatchMeasured() if is_plausible(message):
                self._measured.setdefault(message.worker_id, deque(maxlen=MAX_MEASURED)).append(
                    (now, message)
                )

    def _worker(self, worker_id: int | None) -> EngineNow | None:
        return next(
            (engine for engine in self.engines.values() if engine.joined.worker_id == worker_id), None
        )

    def _drop_departed(self) -> None:
        """Drop the data of engines that have left."""
        there = {engine.joined.worker_id for engine in self.engines.values()}
        self._heartbeats.keep_only(there)
        for kept in (self._measured, self._homes):
            for worker_id in kept.keys() - there:
                del kept[worker_id]

    def drop_outdated(self, now: float) -> None:
        """Drop measurements older than the time window; mark engines that fell silent."""
        for measured in self._measured.values():
            while measured and measured[0][0] < now - LAST_SECONDS:
                measured.popleft()
        for engine in self.engines.values():
            if self._heartbeats.silence(engine.joined.worker_id, now) > SILENT_SECONDS:
                engine.heartbeat = None

    def figures(self) -> dict[str, LoopFigures]:
        """Return the recent figures of each measured engine, under its current epoch."""
        found = {}
        for name, engine in self.engines.items():
            measured = [one for _, one in self._measured.get(engine.joined.worker_id, ())]
            newest = max((one.epoch for one in measured), default=0)
            together = figures([one for one in measured if one.epoch == newest])
            if together is not None:
                found[name] = together
        return found

    def tokens_per_second(self, now: float) -> float:
        """Return the tokens per second computed by all engines."""
        tokens = sum(one.tokens for measured in self._measured.values() for _, one in measured)
        return tokens / max(min(LAST_SECONDS, now - self._began), 1.0)


def is_plausible(one: DispatchMeasured) -> bool:
    """Return whether the values of a message are plausible."""
    parts = (one.remote_ranks, one.local, one.served, one.balance)
    if not 0 < len(one.served) <= MAX_LAYERS or any(len(part) != len(one.served) for part in parts):
        return False
    return (
        one.steps > 0
        and min(one.tokens, one.pairs) >= 0
        and all(0 <= value < math.inf for part in (*parts, (one.step_seconds,)) for value in part)
    )


def figures(measured: Sequence[DispatchMeasured]) -> LoopFigures | None:
    """Combine the measurements over the layers that are not sharded; None if no token was computed.

    Balance and step time are the same for every rank of a step, and are weighted by steps.
    """
    layers = min((len(one.served) for one in measured), default=0)
    whole = [layer for layer in range(layers) if any(one.served[layer] > 0 for one in measured)]
    tokens, pairs, steps = (
        sum(getattr(one, name) for one in measured) for name in ("tokens", "pairs", "steps")
    )
    if not whole or not tokens or not pairs:
        return None

    def over(name: str) -> float:
        return float(sum(getattr(one, name)[layer] for one in measured for layer in whole)) / len(whole)

    communication = [one.communication_seconds for one in measured if one.communication_seconds is not None]
    step_seconds = sum(one.step_seconds for one in measured)
    return LoopFigures(
        remote_ranks=over("remote_ranks") / tokens,
        local=over("local") / pairs,
        balance=over("balance") / steps,
        step_seconds=step_seconds / steps,
        tokens=float(tokens),
        communication=(
            sum(communication) / step_seconds
            if len(communication) == len(measured) and step_seconds > 0
            else None
        ),
    )
