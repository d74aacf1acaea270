"""What a router that has just started should have heard before it says that it is ready: a decision made without it would be a worse one."""

import asyncio
import logging

from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.view import FleetView
from router.sync.fleet_subscriber import FleetSubscriber
from router.sync.peer_routers import PeerRouters

log = logging.getLogger(__name__)

LONGEST_SECONDS = 5.0
"""Then the router serves with what it knows."""
HEARTBEAT_SECONDS = 1.5
"""An engine that has joined and does not show within this time of the start is dead, or slow."""
_LOOK_SECONDS = 0.02


class Readiness:
    """`run` ends when nothing is missing, or after LONGEST_SECONDS; it is `over` from then on. Without a bus it is over at once."""

    def __init__(self, view: FleetView, feeds: FleetSubscriber | None, peers: PeerRouters | None) -> None:
        self.done = asyncio.Event()
        """set when it is over"""
        if feeds is None or peers is None:
            self.done.set()
        self._view = view
        self._feeds = feeds
        self._peers = peers
        self._late_engines = False
        """engines that have not shown yet are not waited for any more"""

    @property
    def over(self) -> bool:
        return self.done.is_set()

    def missing(self) -> list[str]:
        """What is waited for, for people; empty once it is over."""
        if self.over or self._feeds is None or self._peers is None:
            return []
        live = {state.joined.worker_id: state.joined for state in self._view.engines() if state.standing is EngineStatus.LIVE}
        unheard = [state.joined.engine for state in self._view.engines() if state.standing is EngineStatus.UNHEARD and not self._late_engines]
        snapshots = sum(rank[0] in live for rank in self._feeds.kv.out_of_step())
        tables = sorted(self._feeds.tracker.unanswered() & {joined.model for joined in live.values()})
        return [
            *(f"what is stored of {what}" for what in sorted(self._feeds.behind.values())),
            *(f"a heartbeat of engine {engine}" for engine in sorted(unheard)),
            *([f"what the KV caches of {snapshots} ranks hold"] if snapshots else []),
            *(f"the prediction tables of model {model}" for model in tables),
            *([] if self._peers.met.is_set() else ["what other routers have booked"]),
        ]

    async def run(self) -> None:
        """Wait, and say what was not waited for any longer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while missing := self.missing():
            waited = loop.time() - began
            if waited > LONGEST_SECONDS:
                log.warning("ready after %.1f s without %s", waited, "; ".join(missing))
                break
            self._late_engines = waited > HEARTBEAT_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
        self.done.set()
