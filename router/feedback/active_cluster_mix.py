"""Prices of distinct experts, kept in step with the running requests: when an engine's mix of clusters
changes, it is priced again off the event loop.
"""

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, FloatArray
from fleet.signatures import ClusterModel
from router.evaluation.distinct_experts import ClusterMixes, DistinctReads, MixShare, ReadingGroup, read
from router.evaluation.expected_latency import NONE, Surcharge
from router.fleet_state.dispatch_cost import DispatchPrices
from router.fleet_state.engine_state import EngineState
from router.fleet_state.reservations import SEQUENCES, Reservations
from router.fleet_state.view import FleetView
from router.scheduling.decision import Decision

_Key = tuple[str, int]
"""model and top-k"""


class ActiveClusterMix:
    """Mix of active clusters on each engine. `booked` is for the hot path. Engines whose distinct experts
    cost nothing (`expert_read` 0) are skipped.
    """

    def __init__(self, view: FleetView, reservations: Reservations, threads: ThreadPoolExecutor) -> None:
        self._view = view
        self._reservations = reservations
        self._threads = threads
        self._mixes = ClusterMixes()
        self._misses: dict[_Key, tuple[ReadingGroup, Float32Array]] = {}
        """miss probabilities; 2 MB each for 58 layers of 256 experts and 32 clusters"""
        self._surcharges: dict[int, Surcharge] = {}
        self._sent: dict[int, tuple[DispatchPrices | None, ClusterModel | None, float]] = {}
        """prices, clusters and cost of sharded layers that each engine's token surcharge was computed from"""
        self._read_seconds: dict[int, float] = {}
        """seconds per expert that each engine's reading surcharge was computed from"""

    def booked(self, decision: Decision) -> MixShare | None:
        """Add a request to its engine's mix until its share ends. None: its experts make no difference, or
        are unknown.
        """
        target, prediction = decision.target, decision.prediction
        if prediction is None or target.stated_speed is None or not target.stated_speed.expert_read:
            return None
        return self._mixes.book(
            target.engine.worker_id, prediction.request.weights, prediction.request.clusters
        )

    def forget_worker(self, worker_id: int) -> None:
        self._mixes.forget_worker(worker_id)
        self._surcharges.pop(worker_id, None)
        self._sent.pop(worker_id, None)
        self._read_seconds.pop(worker_id, None)

    def surcharge(self, worker_id: int) -> Surcharge:
        """Return the present surcharge of experts on an engine's times."""
        return self._surcharges.get(worker_id, NONE)

    async def refresh(self, now: float) -> None:
        """Price the engines whose mix changed noticeably."""
        due: dict[_Key, list[tuple[EngineState, FloatArray]]] = defaultdict(list)
        readings: dict[_Key, ReadingGroup] = {}
        for state in self._view.engines():
            self._sending(state)
            reading = self._reading(state)
            if reading is None:
                self._surcharges[state.joined.worker_id] = Surcharge(
                    token=self.surcharge(state.joined.worker_id).token
                )
            else:
                key = (state.joined.model, reading.top_k)
                readings[key] = reading
                tokens = self._changed(state, reading, now)
                if tokens is not None:
                    due[key].append((state, tokens))
        self._misses = {key: known for key, known in self._misses.items() if key in readings}
        for key, engines in due.items():
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._read, key, readings[key], [tokens for _, tokens in engines]
            )
            for (state, _), reads, added in zip(engines, found.now, found.added, strict=True):
                self._update(state, readings[key], float(reads), added)

    def _sending(self, state: EngineState) -> None:
        """Update the cost for each rank to send a token of the traffic's mix to other ranks and nodes, in
        whole and in sharded layers."""
        worker_id, speed, clusters = (
            state.joined.worker_id,
            state.stated_speed,
            self._view.clusters(state.joined.model),
        )
        prices = None if state.locality is None else state.locality.prices
        # The collectives of sharded layers carry the tokens of all targets, which are taken to be as many.
        known, gather = self._sent.get(worker_id), state.gather_token * state.ranks
        if known is not None and known[0] is prices and known[1] is clusters and known[2] == gather:
            return
        self._sent[worker_id] = prices, clusters, gather
        seconds: tuple[float, ...] = (gather,) * state.ranks if gather else ()
        if (
            prices is not None
            and clusters is not None
            and speed is not None
            and prices.remote.shape[1] == clusters.clusters
        ):
            seconds = tuple(
                (
                    (speed.dispatch * prices.remote + speed.dispatch_node * prices.nodes) @ clusters.shares
                    + gather
                ).tolist()
            )
        self._surcharges[worker_id] = self.surcharge(worker_id)._replace(token=seconds)

    def _reading(self, state: EngineState) -> ReadingGroup | None:
        """Return the engine's reading group; None: its distinct experts have no price."""
        joined, clusters = state.joined, self._view.clusters(state.joined.model)
        if not _read_seconds(state) or joined.shape is None or clusters is None:
            return None
        if clusters.profiles.shape[1:] != (joined.shape.layers, joined.shape.experts):
            return None
        return ReadingGroup(clusters, joined.shape.top_k)

    def _changed(self, state: EngineState, reading: ReadingGroup, now: float) -> FloatArray | None:
        load = self._reservations.load(np.array(state.rows, np.intp), now)
        sequences = int(load[SEQUENCES].sum())
        worker_id = state.joined.worker_id
        same_price = self._read_seconds.get(worker_id) == _read_seconds(state)
        return self._mixes.changed(
            worker_id, sequences, reading.clusters, delivered=same_price and state.distinct is not None
        )

    def _read(self, key: _Key, reading: ReadingGroup, mixes: list[FloatArray]) -> DistinctReads:
        """Compute expected reads in a thread. No other task touches `key` meanwhile."""
        known = self._misses.get(key)
        if known is None or known[0] != reading:
            known = self._misses[key] = reading, reading.misses()
        return read(known[1], mixes)

    def _update(
        self, state: EngineState, reading: ReadingGroup, reads: float, added: NDArray[np.float64]
    ) -> None:
        worker_id = state.joined.worker_id
        if self._view.engine(worker_id) is state:
            self._view.set_distinct(worker_id, added)
            shape, seconds = reading.clusters.profiles.shape, _read_seconds(state)
            self._read_seconds[worker_id] = seconds
            everything, hit = seconds * shape[1] * shape[2], reading.top_k / shape[2]
            self._surcharges[worker_id] = self.surcharge(worker_id)._replace(
                reading=seconds * reads, all_experts=everything, hit=hit
            )


def _read_seconds(state: EngineState) -> float:
    """Seconds that a distinct expert adds to a step of an engine; 0: not stated, or it costs nothing."""
    return 0.0 if state.stated_speed is None else state.stated_speed.expert_read * state.reads
