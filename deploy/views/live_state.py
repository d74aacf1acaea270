"""What was heard of a fleet up to now, for whoever watches it: engines and their load, what was measured in the last seconds, what happened. Pure."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bus import Received
from deploy.client.fleet_status import EngineNow
from deploy.views.event_lines import words
from fleet.events import (
    DispatchMeasured,
    EngineHeartbeat,
    EngineJoined,
    EngineLeft,
    HomesPublished,
    KvMetrics,
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    RankDrained,
)

LAST_SECONDS = 10.0
"""that figures are of"""
SILENT_SECONDS = 3.0
"""An engine whose heartbeat is older counts as silent."""
MOST_MEASURED = 4096
"""messages of one engine that are kept"""
MOST_EVENTS = 256
MOST_LAYERS = 4096


class EventLine(NamedTuple):
    """Something worth a line. at: Unix seconds, as its sender's clock had it."""

    at: float
    kind: str
    words: str


class LiveState:
    """Fed with what is heard. now: seconds of a clock that never goes back."""

    def __init__(self, began: float) -> None:
        self.engines: dict[str, EngineNow] = {}
        self.events: deque[EventLine] = deque(maxlen=MOST_EVENTS)
        self.happened = 0
        """events so far, also those that are kept no more"""
        self._began = began
        self._measured: dict[int, deque[tuple[float, DispatchMeasured]]] = {}
        self._beaten: dict[int, float] = {}
        self._homes: dict[int, int] = {}

    def present(self, engines: Iterable[EngineNow]) -> None:
        """These have joined and not left, as the log has it; what was heard of them stays."""
        before = self.engines
        self.engines = {}
        for one in engines:
            known = before.get(one.joined.engine)
            if known is not None and known.joined.worker_id == one.joined.worker_id:
                one.heartbeat, one.load = known.heartbeat, known.load
            self.engines[one.joined.engine] = one
        self._forget()

    def hear(self, received: Received, now: float) -> None:
        """One message, of whatever kind."""
        message = received.message
        self.remember(received)
        match message:
            case EngineJoined():
                self.engines[message.engine] = EngineNow(message)
                self._forget()
            case EngineLeft():
                self._leave(message)
            case HomesPublished():
                self._homes[message.worker_id] = message.version
            case _:
                self._note(received, now)

    def remember(self, received: Received) -> None:
        """Only that it happened; nothing follows from it."""
        said = words(received.message, self._homes)
        if said is not None:
            self.happened += 1
            self.events.append(EventLine(received.published_at, type(received.message).__name__, said))

    def _leave(self, message: EngineLeft) -> None:
        known = self.engines.get(message.engine)
        if known is not None and known.joined.worker_id == message.worker_id:
            del self.engines[message.engine]
            self._forget()

    def _note(self, received: Received, now: float) -> None:
        """What is about one engine that is there."""
        message = received.message
        engine = self._worker(getattr(message, "worker_id", None))
        if engine is None:
            return
        match message:
            case EngineHeartbeat():
                engine.heartbeat = message
                self._beaten[message.worker_id] = now
            case KvMetrics() if 0 <= message.dp_rank < len(engine.joined.urls):
                engine.load[message.dp_rank] = message
            case DispatchMeasured() if sound(message):
                self._measured.setdefault(message.worker_id, deque(maxlen=MOST_MEASURED)).append((now, message))
            case RankDrained(draining=True):
                engine.drains[message.rank] = message.reason
            case RankDrained():
                engine.drains.pop(message.rank, None)
            case MigrationPlanned():
                engine.migrating = message.plan
            case MigrationCommitted(last=True) | MigrationAborted():
                engine.migrating = ""

    def _worker(self, worker_id: int | None) -> EngineNow | None:
        return next((engine for engine in self.engines.values() if engine.joined.worker_id == worker_id), None)

    def _forget(self) -> None:
        """What was kept of engines that are gone."""
        there = {engine.joined.worker_id for engine in self.engines.values()}
        for kept in (self._measured, self._beaten, self._homes):
            for worker_id in kept.keys() - there:
                del kept[worker_id]

    def turn(self, now: float) -> None:
        """Drop what is older than what figures are of; engines that fell silent are."""
        for measured in self._measured.values():
            while measured and measured[0][0] < now - LAST_SECONDS:
                measured.popleft()
        for engine in self.engines.values():
            if self._beaten.get(engine.joined.worker_id, -math.inf) < now - SILENT_SECONDS:
                engine.heartbeat = None

    def figures(self) -> dict[str, LoopFigures]:
        """Of each engine of which anything was measured in the last seconds, under the epoch that it serves now."""
        found = {}
        for name, engine in self.engines.items():
            measured = [one for _, one in self._measured.get(engine.joined.worker_id, ())]
            newest = max((one.epoch for one in measured), default=0)
            together = figures([one for one in measured if one.epoch == newest])
            if together is not None:
                found[name] = together
        return found

    def tokens_per_second(self, now: float) -> float:
        """Computed by all engines."""
        tokens = sum(one.tokens for measured in self._measured.values() for _, one in measured)
        return tokens / max(min(LAST_SECONDS, now - self._began), 1.0)


def sound(one: DispatchMeasured) -> bool:
    """Whether what came over the bus can be reckoned with."""
    parts = (one.remote_ranks, one.local, one.served, one.balance)
    if not 0 < len(one.served) <= MOST_LAYERS or any(len(part) != len(one.served) for part in parts):
        return False
    return one.steps > 0 and min(one.tokens, one.pairs) >= 0 and all(0 <= value < math.inf for part in (*parts, (one.step_seconds,)) for value in part)


def figures(measured: Sequence[DispatchMeasured]) -> LoopFigures | None:
    """All together, over the layers that are not sharded; None where no token was computed. Balance and step time are the same for every
    rank of a step, and are weighted with the steps."""
    layers = min((len(one.served) for one in measured), default=0)
    whole = [layer for layer in range(layers) if any(one.served[layer] > 0 for one in measured)]
    tokens, pairs, steps = (sum(getattr(one, name) for one in measured) for name in ("tokens", "pairs", "steps"))
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
        communication=sum(communication) / step_seconds if len(communication) == len(measured) and step_seconds > 0 else None,
    )
