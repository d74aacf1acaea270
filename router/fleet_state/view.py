"""View of the fleet: engines, placements and clusters. The one mutable state behind target tables. Pure; the
time comes in as an argument.

State: engines by worker_id, cluster models by model, and the target tables and price lists built from them,
which are dropped when any input changes. Loads are in `reservations`, KV contents in `router.prefix_index`.
"""

from collections import Counter, deque
from collections.abc import Iterator

import numpy as np

from fleet.arrays import FloatArray
from fleet.facts.engines import EngineJoined
from fleet.layout import Layout
from fleet.membership import Heartbeats, Membership
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from fleet.timing import MAX_SECONDS
from router.fleet_state.cluster_homes import ClusterHomes
from router.fleet_state.dispatch_cost import DispatchCost
from router.fleet_state.engine_state import (
    EngineState,
    EngineStatus,
    PriceList,
    build,
    column,
    note,
    price_list,
)
from router.fleet_state.reservations import Reservations
from router.fleet_state.target_table import TargetTable

_KEPT_CLUSTERS = 8
"""Cluster versions kept, of all models together, so that recent decisions can still name experts; some 2 MB
each at DeepSeek-V3's size.
"""


class FleetView:
    """View of the fleet; see the module docstring. Methods return what changed, so that the caller can do the
    I/O that follows.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._engines: Membership[EngineState] = Membership()
        self._heartbeats = Heartbeats()
        self._clusters: dict[str, ClusterModel] = {}
        self._latest_clusters: deque[ClusterModel] = deque(maxlen=_KEPT_CLUSTERS)
        """strong references to clusters that decisions refer to weakly"""
        self._tables: dict[str, TargetTable] = {}
        self._prices: dict[str, PriceList] = {}
        self._handovers: dict[str, tuple[TargetTable, FloatArray | None]] = {}
        self.version = 0
        """number of changes; part of every decision"""
        self._text, self._text_at = False, 0
        """`serves_text`, and the version at which it was computed"""

    def join(self, joined: EngineJoined, now: float, *, probed: bool = False) -> list[int]:
        """Add an engine. Return the worker_ids that it supersedes (earlier incarnations of its name), which
        are forgotten. probed: probes decide its liveness, not its heartbeats.

        ValueError when its placement breaks an invariant, its urls are missing, or its nodes are not one per
        rank.
        """
        if not joined.urls:
            raise ValueError(f"engine {joined.engine!r} joined without any url")
        if joined.nodes and len(joined.nodes) != joined.expert_ranks:
            raise ValueError(
                f"engine {joined.engine!r} names {len(joined.nodes)} nodes for {joined.expert_ranks} ranks;"
                " one per rank, or none, is allowed"
            )
        placement = None if joined.served is None else Placement.from_record(joined.served)
        old = self._engines.get(joined.worker_id)
        state = EngineState(joined, placement, joined.layout, probed=probed)
        if old is None:
            self._heartbeats.beat(joined.worker_id, now)
        else:
            state.resume(old)
        superseded = self._engines.join(joined.engine, joined.worker_id, state)
        for worker, ended in superseded.items():
            self._remove_ranks(worker, ended)
        state.rows = [
            self._reservations.add_rank((joined.worker_id, rank)) for rank in range(len(joined.urls))
        ]
        self._changed()
        return list(superseded)

    def leave(self, worker_id: int, reason: str = "") -> bool:
        """Record that an engine has left, and the reason that it gave. Its running streams are not touched.
        False if it is unknown.
        """
        state = self._engines.get(worker_id)
        if state is not None:
            state.goodbye = reason
        return self._set_status(worker_id, EngineStatus.LEFT)

    def sign_of_life(self, worker_id: int, now: float) -> bool:
        """Record a sign of life. False if the engine is unknown."""
        state = self._engines.get(worker_id)
        if state is None:
            return False
        self._heartbeats.beat(worker_id, now)
        if state.status is not EngineStatus.LEFT:
            self._set_status(worker_id, EngineStatus.LIVE)
        return True

    def unreachable(self, worker_id: int) -> None:
        """Record a failed connection. The engine is not used before its next sign of life."""
        state = self._engines.get(worker_id)
        if state is not None and state.status is EngineStatus.LIVE:
            self._set_status(worker_id, EngineStatus.UNREACHABLE)

    def listen(self, now: float, *, audible: bool) -> None:
        """Record that the bus delivers messages at present, or does not: then silences start over."""
        self._heartbeats.listen(now, audible=audible)

    def sweep(self, now: float, dead_after: float, forget_after: float) -> list[int]:
        """Declare silent engines dead, and forget those silent for long. Return the forgotten worker_ids."""
        for worker, state in self._engines.items():
            silent = not state.probed and self._heartbeats.silence(worker, now) > dead_after
            if silent and state.status in (EngineStatus.LIVE, EngineStatus.UNREACHABLE):
                self._set_status(worker, EngineStatus.DEAD)
        old = [
            worker
            for worker, state in self._engines.items()
            if self._heartbeats.silence(worker, now) > forget_after
            and not (state.probed and state.status is EngineStatus.LIVE)
        ]
        for worker in old:
            self.forget(worker)
        return old

    def forget(self, worker_id: int) -> None:
        state = self._engines.end(worker_id)
        if state is not None:
            self._remove_ranks(worker_id, state)

    def _remove_ranks(self, worker_id: int, state: EngineState) -> None:
        self._heartbeats.keep_only(self._engines)
        for rank in range(len(state.joined.urls)):
            self._reservations.remove_rank((worker_id, rank))
        self._changed()

    def block(self, worker_id: int, reason: str | None) -> None:
        """Set the reason why a live engine cannot be used, or (None) clear it."""
        state = self._engines.get(worker_id)
        if state is not None and state.blocked != reason:
            state.blocked = reason
            self._changed()

    def place(self, worker_id: int, placement: Placement, layout: Layout) -> bool:
        """Record a newly served placement. False if the engine is unknown or the epoch is not newer."""
        state = self._engines.get(worker_id)
        if state is None or (state.placement is not None and placement.epoch <= state.placement.epoch):
            return False
        if not state.prices_outlast(layout):
            state.locality = None  # otherwise the prices of the last epoch stand until the new ones are known
        state.placement, state.layout = placement, layout
        self._changed()
        return True

    def learn(self, model: str, clusters: ClusterModel) -> bool:
        """Record a model's clusters. False if they are not newer than the known ones."""
        known = self._clusters.get(model)
        if known is not None and known.version >= clusters.version:
            return False
        self._clusters[model] = clusters
        self._latest_clusters.append(clusters)
        self._prices.pop(model, None)
        return True

    def keep_clusters(self) -> set[str]:
        """Drop the clusters of models that no engine serves, dead or alive. Return the remaining models."""
        models = set(self.models(live=False))
        self._clusters = {model: clusters for model, clusters in self._clusters.items() if model in models}
        return models

    def set_homes(self, worker_id: int, homes: ClusterHomes) -> bool:
        """Record the planner's homes of an engine. They wait until their epoch is priced. False if the engine
        is unknown, or newer homes are known.
        """
        state = self._engines.get(worker_id)
        updated = None if state is None else state.homes.received(homes, state.priced_epoch)
        if state is None or updated is None or updated is state.homes:
            return False
        state.homes = updated
        self._drop_prices(state)
        self.version += 1
        return True

    def price(self, worker_id: int, epoch: int | None, found: DispatchCost) -> None:
        """Record the dispatch cost of a placement epoch. From now on decisions use it, together with the
        homes that waited for it. Ignored if the epoch has passed in the meantime.
        """
        state = self._engines.get(worker_id)
        if state is None or epoch != (None if state.placement is None else state.placement.epoch):
            return
        before = note(state)
        state.locality, state.priced_epoch, state.homes = found, epoch, state.homes.reaching(epoch)
        if note(state) == before:
            self.version += 1
            self._drop_prices(state)
        else:
            self._changed()

    def set_distinct(self, worker_id: int, added: FloatArray) -> None:
        """Set the experts that one more request of each cluster adds to a step of the engine, summed over
        layers, given its running requests: float64 [K]. Cheap: nothing is rebuilt. An unknown worker is
        ignored. A number of clusters other than the current one has no effect. ValueError for values that are
        not a number of experts.
        """
        if not ((added >= 0) & (added < np.inf)).all():
            raise ValueError(f"worker {worker_id}: added experts must be finite and not negative")
        state = self._engines.get(worker_id)
        if state is None:
            return
        state.distinct = added
        for model in state.contexts:
            found, target_table = self._prices.get(model), self._tables.get(model)
            at = None if target_table is None else target_table.index.get((worker_id, 0))
            if found is not None and target_table is not None and at is not None:
                found.distinct[target_table.engine[at]] = added if len(added) == found.clusters else 0.0

    def handing_over(self, worker_id: int, seconds: float) -> None:
        """Set the cost in seconds that a migration or layout switch in progress adds to a new request; 0:
        there is none. ValueError for an impossible cost.
        """
        if not 0 <= seconds <= MAX_SECONDS:
            raise ValueError(
                f"worker {worker_id}: a handover must cost finite seconds >= 0 (and at most"
                f" {MAX_SECONDS:g}), not {seconds}"
            )
        state = self._engines.get(worker_id)
        if state is not None and state.handover_seconds != seconds:
            state.handover_seconds = seconds
            self._handovers.clear()

    def handovers(self, target_table: TargetTable) -> FloatArray | None:
        """Return the cost of handovers in progress, float64 [targets] seconds; None without any, the usual
        case.
        """
        known = self._handovers.get(target_table.model)
        if known is None or known[0] is not target_table:
            states = (self._engines.get(target.key[0]) for target in target_table.targets)
            seconds = column(0.0 if state is None else state.handover_seconds for state in states)
            known = self._handovers[target_table.model] = target_table, seconds if seconds.any() else None
        return known[1]

    def engines(self) -> Iterator[EngineState]:
        return iter(list(self._engines.values()))

    def engine(self, worker_id: int) -> EngineState | None:
        return self._engines.get(worker_id)

    def clusters(self, model: str) -> ClusterModel | None:
        return self._clusters.get(model)

    def models(self, *, live: bool) -> list[str]:
        """Return the names of models, sorted: those of live engines, or of all engines not yet forgotten."""
        return sorted(
            {
                model
                for state in self._engines.values()
                if not live or state.obstacle is None
                for model in state.contexts
            }
        )

    @property
    def serves_text(self) -> bool:
        """True if any engine, live or not, accepts requests only as text."""
        if self._text_at != self.version:
            self._text_at = self.version
            self._text = any(state.dialect == "text" for state in self._engines.values())
        return self._text

    def default_text_model(self) -> str | None:
        """Return the model for requests that name none: the base model that most live engines serve as text,
        the first by name among equals.
        """
        live = (
            state.joined.model
            for state in self._engines.values()
            if state.obstacle is None and state.dialect == "text"
        )
        counts = Counter(model for model in live if self.target_table(model).dialect == "text")
        return min(counts, key=lambda model: (-counts[model], model), default=None)

    def target_table(self, model: str) -> TargetTable:
        """Return the target table of a model. Empty when no rank may serve it."""
        if model not in self._tables:
            if model not in self.models(live=False):
                return build(model, list(self._engines.values()))  # not kept: clients choose these names
            self._tables[model] = build(model, list(self._engines.values()))
        return self._tables[model]

    def prices(self, model: str) -> PriceList:
        """Return the known prices of a token of each cluster at each target of the model's table."""
        if model not in self._prices:
            found = price_list(self.target_table(model), self._engines, self._clusters.get(model))
            if model not in self._tables:
                return found
            self._prices[model] = found
        return self._prices[model]

    def _drop_prices(self, state: EngineState) -> None:
        for model in state.contexts:
            self._prices.pop(model, None)

    def _set_status(self, worker_id: int, status: EngineStatus) -> bool:
        state = self._engines.get(worker_id)
        if state is None:
            return False
        if state.status is not status:
            state.status = status
            self._changed()
        return True

    def _changed(self) -> None:
        self.version += 1
        self._tables.clear()
        self._prices.clear()
        self._handovers.clear()
