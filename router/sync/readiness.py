"""Readiness of a router that has just started: the state it should receive first, because decisions without
it would be worse.
"""

import asyncio
import logging

from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.view import FleetView
from router.sync.fleet_subscriber import FleetSubscriber
from router.sync.peer_routers import PeerRouters

log = logging.getLogger(__name__)

MAX_SECONDS = 5.0
"""After this time the router serves with the state it has."""
HEARTBEAT_SECONDS = 1.5
"""An engine that joined and sends no heartbeat within this time of the start is dead, or slow."""
_LOOK_SECONDS = 0.02


class Readiness:
    """Wait for the initial state. `run` ends when nothing is missing, or after MAX_SECONDS; `over` is
    true from then on. Without a bus it is true at once.
    """

    def __init__(
        self, view: FleetView, fleet_subscriber: FleetSubscriber | None, peers: PeerRouters | None
    ) -> None:
        self.done = asyncio.Event()
        """set when the wait is over"""
        if fleet_subscriber is None or peers is None:
            self.done.set()
        self._view = view
        self._fleet_subscriber = fleet_subscriber
        self._peers = peers
        self._late_engines = False
        """engines without a heartbeat are not waited for any longer"""

    @property
    def over(self) -> bool:
        return self.done.is_set()

    def missing(self) -> list[str]:
        """Return descriptions of the missing state; empty once the wait is over."""
        if self.over or self._fleet_subscriber is None or self._peers is None:
            return []
        live = {
            state.joined.worker_id: state.joined
            for state in self._view.engines()
            if state.status is EngineStatus.LIVE
        }
        without_heartbeat = [
            state.joined.engine
            for state in self._view.engines()
            if state.status is EngineStatus.NO_HEARTBEAT and not self._late_engines
        ]
        snapshots = sum(rank[0] in live for rank in self._fleet_subscriber.kv.out_of_step())
        tables = sorted(
            self._fleet_subscriber.tracker.unanswered() & {joined.model for joined in live.values()}
        )
        return [
            *(f"the stored {what}" for what in sorted(self._fleet_subscriber.unread.values())),
            *(f"a heartbeat of engine {engine}" for engine in sorted(without_heartbeat)),
            *([f"the KV snapshots of {snapshots} ranks"] if snapshots else []),
            *(f"the prediction tables of model {model}" for model in tables),
            *([] if self._peers.synchronized.is_set() else ["the bookings of other routers"]),
        ]

    async def run(self) -> None:
        """Wait, and log the state that is still missing at the end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while missing := self.missing():
            waited = loop.time() - began
            if waited > MAX_SECONDS:
                log.warning("ready after %.1f s without %s", waited, "; ".join(missing))
                break
            self._late_engines = waited > HEARTBEAT_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
        self.done.set()
