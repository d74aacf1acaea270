"""One target of a server behind the Engine port: what its agent takes and publishes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine_adapter.engine import (
    Activations,
    DispatchCounts,
    EndedRequest,
    EngineDescription,
    RankFacts,
    RankLoad,
)
from engine_adapter.foreign.kv_blocks import Change
from fleet.facts.activity import RearrangementTime
from fleet.placement import Placement

IDLE = RankLoad(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)
MAX_ENDED_BYTES = 32 * 1024 * 1024
"""Memory of requests that wait to be taken. Beyond it, the oldest are dropped."""


class ServerTarget:
    """One data-parallel rank. The deployment reports to it; its agent takes the facts."""

    def __init__(self, description: EngineDescription, placement: Callable[[], Placement | None]) -> None:
        """placement: returns the placement in force."""
        self.description = description
        self._placement = placement
        self._news = asyncio.Event()
        self._kv: list[Change] = []
        self._load = IDLE
        self._activations: Activations | None = None
        self._ended: list[EndedRequest] = []
        self._ended_bytes = 0
        self._ended_lost = 0
        self._sent: list[DispatchCounts] = []
        self._rearrangements: tuple[RearrangementTime, ...] = ()

    @property
    def placement(self) -> Placement | None:
        return self._placement()

    @property
    def handover_seconds(self) -> float:
        return 0.0

    @property
    def experts(self) -> None:
        """None: the server moves its experts itself, if at all."""
        return

    async def start(self) -> None:
        """Do nothing: the deployment is up."""

    async def run(self) -> None:
        """Wait until cancelled: the deployment follows the server for all of its targets."""
        await asyncio.Event().wait()

    async def wait_facts(self) -> None:
        await self._news.wait()

    def take_facts(self) -> RankFacts:
        self._news.clear()
        facts = RankFacts(
            kv=tuple(self._kv),
            load=self._load,
            activations=self._activations,
            ended=tuple(self._ended),
            ended_lost=self._ended_lost,
            sent=tuple(self._sent),
        )
        self._kv, self._activations, self._sent = [], None, []
        self._ended, self._ended_bytes, self._ended_lost = [], 0, 0
        return facts

    def cached(self, changes: Sequence[Change]) -> None:
        """Report changes of the KV cache."""
        self._kv.extend(changes)
        self._news.set()

    def loaded(self, load: RankLoad, cached_tokens: int) -> None:
        """Report the load. cached_tokens: prompt tokens reused from the KV cache since the last report."""
        if load != self._load:
            self._news.set()
        self._load = load
        if cached_tokens and self.description.shape is not None:
            shape = self.description.shape
            self.activated(
                Activations(np.zeros((shape.layers, shape.experts), np.int64), 0, max(cached_tokens, 0))
            )

    def activated(self, new: Activations) -> None:
        """Report activated experts."""
        old = self._activations
        self._activations = (
            new
            if old is None
            else Activations(
                old.counts + new.counts, old.tokens + new.tokens, old.cached_tokens + new.cached_tokens
            )
        )

    def dispatched(self, counts: DispatchCounts) -> None:
        """Report where tokens were sent."""
        counts = replace(counts, rearrangements=counts.rearrangements + self._rearrangements)
        self._rearrangements = ()
        if self._sent and self._sent[-1].epoch == counts.epoch:
            self._sent[-1] = self._sent[-1].with_more(counts)
        else:
            self._sent.append(counts)

    def rearranged(self, time: RearrangementTime) -> None:
        """Report a change of the map. It is told with the next dispatched tokens."""
        self._rearrangements += (time,)

    def ended(self, request: EndedRequest) -> None:
        """Report an ended request."""
        self._ended.append(request)
        self._ended_bytes += request.nbytes
        while self._ended_bytes > MAX_ENDED_BYTES:
            self._ended_bytes -= self._ended.pop(0).nbytes
            self._ended_lost += 1
        self._news.set()
