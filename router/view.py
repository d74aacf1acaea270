"""What is known of engines, placements and clusters: the one mutable state behind rosters. Pure: time comes in as an argument.

State: engines by worker_id, cluster models by model, and the rosters and price lists made of them, dropped whenever something they
were made of changes. Loads live in `reservations`, KV contents in `kv_index` and `prefixes`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np
from numpy.typing import NDArray

from fleet.events import EngineJoined
from fleet.layout import EP, Layout
from fleet.placement import Placement
from fleet.signatures import ClusterModel, Weights
from fleet.timing import MOST_SECONDS, EngineSpeed
from router.locality import Locality, Prices
from router.reservations import Reservations
from router.roster import Dialect, Excluded, RankKey, Roster, Target

_DEFAULT_SPEED = EngineSpeed()
Cells = NDArray[np.float64]


class Standing(StrEnum):
    """Where an engine stands; only a live one is routed to. The value is the reason given for leaving it out."""

    UNHEARD = "no heartbeat heard yet"
    LIVE = "live"
    DEAD = "dead: its heartbeats stopped"
    LEFT = "left: it stopped serving on purpose"
    UNREACHABLE = "unreachable: a connection to it failed and no heartbeat has been heard since"


@dataclass(slots=True)
class EngineState:
    """One incarnation of an engine. `heard_at`: seconds on the router's clock."""

    joined: EngineJoined
    heard_at: float
    placement: Placement | None
    layout: Layout | None
    standing: Standing = Standing.UNHEARD
    locality: Locality | None = None
    """None: not priced yet"""
    priced_epoch: int | None = None
    """placement epoch that `locality` is about"""
    blocked: str | None = None
    """why a live engine cannot be used (its tokenizer is missing)"""
    rows: list[int] = field(default_factory=list)
    distinct: Cells | None = None
    """[K]: experts that a request of each cluster adds to a step of the engine; None: nobody has said"""
    handover_seconds: float = 0.0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Machine of each rank."""
        return self.joined.nodes or (self.joined.node,) * len(self.joined.urls)

    @property
    def ranks(self) -> int:
        """Targets of this engine: its ranks, or 1 when the engine is one target."""
        one_target = self.layout is not None and not self.layout.targets_are_ranks
        return 1 if one_target or len(set(self.joined.urls)) == 1 else len(self.joined.urls)

    @property
    def is_one_of_many(self) -> bool:
        """Whether the engine is one target though it has several ranks."""
        return self.ranks == 1 < len(self.joined.urls)

    @property
    def reads(self) -> float:
        """Share of a step's distinct experts that each rank reads: the ranks read theirs at once. 0 where experts are sharded over all
        ranks, and what that saves is not known."""
        shape, layout = self.joined.shape, self.layout or EP
        sharded = shape is None or layout.attention == "tp" or layout.boundary >= shape.layers
        return 0.0 if sharded else 1.0 / len(self.joined.urls)

    @property
    def dialect(self) -> Dialect:
        return "ids" if self.joined.capabilities.token_ids and self.joined.tokenizer is not None else "text"

    @property
    def obstacle(self) -> str | None:
        """Why no request can be sent here now."""
        return self.blocked if self.standing is Standing.LIVE else self.standing.value


class PriceList:
    """The prices of a model's targets, in the order of its roster, for a token of each cluster: one matrix, so that a decision needs one
    product. Where `priced`, bool [targets], is not, they are 0."""

    def __init__(self, roster: Roster, clusters: int) -> None:
        targets = len(roster.targets)
        self.clusters = clusters
        self.priced = np.zeros(targets, np.bool_)
        self._engine = roster.engine
        self.flat = np.zeros((3 * targets + len(roster.first), clusters), np.float32)
        """[3 * targets + engines, K]: the rows of the next four, one after another; half the bytes of float64 make half the time of the product"""
        self.remote, self.nodes, self.local = self.flat[: 3 * targets].reshape(3, targets, clusters)
        """[targets, K]: distinct remote ranks and nodes, and local share, as in `locality.Prices`"""
        self.distinct = self.flat[3 * targets :]
        """[engines, K]: experts added to a step"""
        self._prior: tuple[Weights, Cells] | None = None

    def of(self, weights: Weights) -> tuple[Cells, Cells, Cells, Cells]:
        """For a request's weights [K]: remote ranks, remote nodes, local share and added experts, float64 [targets] each."""
        found, targets = (self.flat @ weights).astype(np.float64), len(self.priced)
        return found[:targets], found[targets : 2 * targets], found[2 * targets : 3 * targets], found[3 * targets :].take(self._engine)

    def prior_local(self, shares: Weights) -> Cells:
        """float64 [targets]: the local share of the traffic's mix [K]; computed once for each value of it."""
        if self._prior is None or self._prior[0] is not shares:
            self._prior = shares, (self.local @ shares).astype(np.float64)
        return self._prior[1]


class View:
    """See the module's first lines for what it holds. Methods tell what changed, so that the caller can do the I/O that follows."""

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._engines: dict[int, EngineState] = {}
        self._clusters: dict[str, ClusterModel] = {}
        self._rosters: dict[str, Roster] = {}
        self._prices: dict[str, PriceList] = {}
        self._handovers: dict[str, tuple[Roster, Cells | None]] = {}
        self.version = 0
        """counts changes; part of every decision"""

    def join(self, joined: EngineJoined, now: float) -> list[int]:
        """An engine serves. Returns the worker_ids it supersedes (earlier incarnations of its name), which are forgotten.

        ValueError when its placement breaks an invariant, its urls are missing, or its nodes are not one per rank.
        """
        if not joined.urls:
            raise ValueError(f"engine {joined.engine!r} joined without any url")
        if joined.nodes and len(joined.nodes) != len(joined.urls):
            raise ValueError(f"engine {joined.engine!r} names {len(joined.nodes)} nodes for {len(joined.urls)} ranks; one per rank, or none, is allowed")
        placement = None if joined.placement is None else Placement.from_record(joined.placement)
        old = self._engines.get(joined.worker_id)
        state = EngineState(joined, now, placement, joined.layout)
        if old is not None:
            state.heard_at, state.blocked, state.handover_seconds = old.heard_at, old.blocked, old.handover_seconds
            state.standing = Standing.UNHEARD if old.standing is Standing.LEFT else old.standing
            if old.placement is not None and (placement is None or old.placement.epoch > placement.epoch):
                state.placement, state.layout = old.placement, old.layout
        superseded = [worker for worker, other in self._engines.items() if other.joined.engine == joined.engine and worker != joined.worker_id]
        for worker in superseded:
            self.forget(worker)
        self._engines[joined.worker_id] = state
        state.rows = [self._reservations.add_rank((joined.worker_id, rank)) for rank in range(len(joined.urls))]
        self._changed()
        return superseded

    def leave(self, worker_id: int) -> bool:
        """An engine stopped on purpose; streams that still run there are not touched. False when it is unknown."""
        return self._stand(worker_id, Standing.LEFT)

    def heard(self, worker_id: int, now: float) -> bool:
        """A sign of life. False when nobody of that id is known."""
        state = self._engines.get(worker_id)
        if state is None:
            return False
        state.heard_at = now
        if state.standing is not Standing.LEFT:
            self._stand(worker_id, Standing.LIVE)
        return True

    def unreachable(self, worker_id: int) -> None:
        """A connection failed: not used again before the next sign of life."""
        state = self._engines.get(worker_id)
        if state is not None and state.standing is Standing.LIVE:
            self._stand(worker_id, Standing.UNREACHABLE)

    def sweep(self, now: float, dead_after: float, forget_after: float, audible_since: float = -inf) -> list[int]:
        """Declare silent engines dead and forget those silent for long; returns the worker_ids forgotten. What was silent before
        `audible_since` is no silence: nobody could be heard."""
        for worker, state in self._engines.items():
            if now - max(state.heard_at, audible_since) > dead_after and state.standing in (Standing.LIVE, Standing.UNREACHABLE):
                self._stand(worker, Standing.DEAD)
        old = [worker for worker, state in self._engines.items() if now - max(state.heard_at, audible_since) > forget_after]
        for worker in old:
            self.forget(worker)
        return old

    def forget(self, worker_id: int) -> None:
        state = self._engines.pop(worker_id, None)
        if state is not None:
            for rank in range(len(state.joined.urls)):
                self._reservations.remove_rank((worker_id, rank))
            self._changed()

    def block(self, worker_id: int, reason: str | None) -> None:
        """Say why a live engine cannot be used, or (None) that it can."""
        state = self._engines.get(worker_id)
        if state is not None and state.blocked != reason:
            state.blocked = reason
            self._changed()

    def place(self, worker_id: int, placement: Placement, layout: Layout) -> bool:
        """An engine serves another placement. False when it is unknown or the epoch is not newer."""
        state = self._engines.get(worker_id)
        if state is None or (state.placement is not None and placement.epoch <= state.placement.epoch):
            return False
        if layout != state.layout or state.locality is None or state.locality.prices is None:
            state.locality = None  # else the prices of the last epoch stand until those of this one are known
        state.placement, state.layout = placement, layout
        self._changed()
        return True

    def learn(self, model: str, clusters: ClusterModel) -> bool:
        """A model's clusters. False when they are not newer than those known."""
        known = self._clusters.get(model)
        if known is not None and known.version >= clusters.version:
            return False
        self._clusters[model] = clusters
        self._prices.pop(model, None)
        return True

    def keep_clusters(self) -> set[str]:
        """Let go of the clusters of models that no engine serves, dead or alive; returns the models that are left."""
        models = {state.joined.model for state in self._engines.values()}
        self._clusters = {model: clusters for model, clusters in self._clusters.items() if model in models}
        return models

    def price(self, worker_id: int, epoch: int | None, found: Locality) -> None:
        """Note what a placement epoch costs; ignored when the epoch has passed meanwhile."""
        state = self._engines.get(worker_id)
        if state is None or epoch != (None if state.placement is None else state.placement.epoch):
            return
        said = _note(state)
        state.locality, state.priced_epoch = found, epoch
        if _note(state) == said:
            self.version += 1
            self._prices.pop(state.joined.model, None)
        else:
            self._changed()

    def set_distinct(self, worker_id: int, added: Cells) -> None:
        """Experts that one more request of each cluster adds to a step of the engine, summed over layers, given what runs there:
        float64 [K]. Cheap: nothing is rebuilt. An unknown worker is ignored; with another number of clusters than there are now it
        counts for nothing. ValueError for what is no number of experts."""
        if not ((added >= 0) & (added < np.inf)).all():
            raise ValueError(f"worker {worker_id}: added experts must be finite and not negative")
        state = self._engines.get(worker_id)
        if state is None:
            return
        state.distinct = added
        found, roster = self._prices.get(state.joined.model), self._rosters.get(state.joined.model)
        at = None if roster is None else roster.index.get((worker_id, 0))
        if found is not None and roster is not None and at is not None:
            found.distinct[roster.engine[at]] = added if len(added) == found.clusters else 0.0

    def handing_over(self, worker_id: int, seconds: float) -> None:
        """What a migration or layout switch in progress costs a request that comes now; 0: there is none. ValueError when that cannot be."""
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"worker {worker_id}: a handover must cost finite seconds >= 0 (and at most {MOST_SECONDS:g}), not {seconds}")
        state = self._engines.get(worker_id)
        if state is not None and state.handover_seconds != seconds:
            state.handover_seconds = seconds
            self._handovers.clear()

    def handovers(self, roster: Roster) -> Cells | None:
        """float64 [targets]: seconds that a handover in progress costs; None: there is none, which is the usual case."""
        known = self._handovers.get(roster.model)
        if known is None or known[0] is not roster:
            states = (self._engines.get(target.key[0]) for target in roster.targets)
            seconds = _column(0.0 if state is None else state.handover_seconds for state in states)
            known = self._handovers[roster.model] = roster, seconds if seconds.any() else None
        return known[1]

    def engines(self) -> Iterator[EngineState]:
        return iter(list(self._engines.values()))

    def engine(self, worker_id: int) -> EngineState | None:
        return self._engines.get(worker_id)

    def clusters(self, model: str) -> ClusterModel | None:
        return self._clusters.get(model)

    def models(self, *, live: bool) -> list[str]:
        """Names of models, sorted: those of live engines, or of all engines not yet forgotten."""
        return sorted({state.joined.model for state in self._engines.values() if not live or state.obstacle is None})

    def roster(self, model: str) -> Roster:
        """The ranks that may serve a model now; empty when there is none."""
        if model not in self._rosters:
            if model not in self.models(live=False):
                return _build(model, list(self._engines.values()))  # not kept: clients choose these names
            self._rosters[model] = _build(model, list(self._engines.values()))
        return self._rosters[model]

    def prices(self, model: str) -> PriceList:
        """What a token of each cluster costs at each target of the model's roster, as far as that is known."""
        if model not in self._prices:
            found = self._price_list(self.roster(model), self._clusters.get(model))
            if model not in self._rosters:
                return found
            self._prices[model] = found
        return self._prices[model]

    def _price_list(self, roster: Roster, clusters: ClusterModel | None) -> PriceList:
        found = PriceList(roster, 0 if clusters is None else clusters.clusters)
        for at, target in enumerate(roster.targets):
            state = self._engines[target.key[0]]
            prices = _prices(state, target.rank, clusters)
            if prices is not None:
                found.remote[at], found.nodes[at], found.local[at] = prices.remote[target.rank], prices.nodes[target.rank], prices.local[target.rank]
                found.priced[at] = True
            if state.distinct is not None and len(state.distinct) == found.clusters:
                found.distinct[roster.engine[at]] = state.distinct
        return found

    def _stand(self, worker_id: int, standing: Standing) -> bool:
        state = self._engines.get(worker_id)
        if state is None:
            return False
        if state.standing is not standing:
            state.standing = standing
            self._changed()
        return True

    def _changed(self) -> None:
        self.version += 1
        self._rosters.clear()
        self._prices.clear()
        self._handovers.clear()


def _build(model: str, engines: list[EngineState]) -> Roster:
    """Keep the engines that can serve the model in one dialect and one tokenizer; ids win over text, the first joined over later ones."""
    serving = [state for state in engines if state.joined.model == model and state.obstacle is None]
    dialect: Dialect = "ids" if any(state.dialect == "ids" for state in serving) else "text"
    tokenizer = next((state.joined.tokenizer for state in serving if state.dialect == "ids"), None)
    kept: list[EngineState] = []
    excluded: list[Excluded] = []
    for state in engines:
        reason = _unfit(state, model, dialect, tokenizer)
        if reason is None:
            kept.append(state)
        else:
            excluded += [Excluded(state.joined.engine, rank, reason) for rank in range(state.ranks)]
    return _columns(model, dialect, tokenizer, kept, tuple(excluded))


def _unfit(state: EngineState, model: str, dialect: Dialect, tokenizer: str | None) -> str | None:
    if state.joined.model != model:
        return f"serves another model: {state.joined.model}"
    if state.obstacle is not None:
        return state.obstacle
    if state.dialect != dialect:
        return "takes no token ids, and other engines of this model do"
    if dialect == "ids" and state.joined.tokenizer != tokenizer:
        return "its tokenizer differs from that of the engine that joined first"
    return None


def _columns(model: str, dialect: Dialect, tokenizer: str | None, engines: list[EngineState], excluded: tuple[Excluded, ...]) -> Roster:
    ranks = [(state, rank) for state in engines for rank in range(state.ranks)]
    speeds = [state.joined.speed or _DEFAULT_SPEED for state, _ in ranks]
    members = np.array([state.ranks for state in engines], np.intp)
    engine, first = np.repeat(np.arange(len(engines)), members), np.cumsum(members) - members
    targets = tuple(_target(state, rank) for state, rank in ranks)
    sizes = [state.joined.block_size for state, _ in ranks]
    contexts = [state.joined.max_context for state, _ in ranks]
    kv_blocks = [state.joined.kv_blocks or inf for state, _ in ranks]
    return Roster(
        model=model,
        dialect=dialect,
        tokenizer=tokenizer,
        targets=targets,
        excluded=excluded,
        index={target.key: at for at, target in enumerate(targets)},
        rows=np.array([state.rows[rank] for state, rank in ranks], np.intp),
        block_size=np.array(sizes, np.int64),
        max_context=np.array(contexts, np.int64),
        prefill_token_s=_column(speed.prefill_token for speed in speeds),
        prefill_pair_s=_column(speed.prefill_pair for speed in speeds),
        step_s=_column(speed.step for speed in speeds),
        decode_sequence_s=_column(speed.decode_sequence for speed in speeds),
        decode_block_s=_column(speed.decode_block for speed in speeds),
        decode_token_block_s=_column(speed.decode_block / size for speed, size in zip(speeds, sizes, strict=True)),
        dispatch_s=_column(speed.dispatch for speed in speeds),
        dispatch_node_s=_column(speed.dispatch_node for speed in speeds),
        expert_read_s=_column(speed.expert_read * state.reads for speed, (state, _) in zip(speeds, ranks, strict=True)),
        engine=engine,
        first=first,
        group=np.stack([engine, engine + len(engines)]),
        group_first=np.concatenate([first, first + len(ranks)]),
        together=np.repeat(members > 1, members).astype(np.float64) if members.max(initial=0) > 1 else None,
        approximate=np.array([not state.joined.capabilities.kv_events for state, _ in ranks], np.bool_),
        block_sizes=tuple(sorted(set(sizes))),
        all_at=np.arange(len(ranks)),
        guessed=tuple(target.key for target in targets if not target.engine.capabilities.kv_events),
        largest_context=max(contexts, default=0),
        smallest_context=min(contexts, default=0),
        kv_blocks=np.array(kv_blocks, np.float64),
        fewest_kv_blocks=min(kv_blocks, default=inf),
        slowest_prefill_s=max((speed.prefill_token for speed in speeds), default=0.0),
    )


def _column(values: Iterable[float]) -> Cells:
    return np.fromiter(values, np.float64)


def _target(state: EngineState, rank: int) -> Target:
    key: RankKey = (state.joined.worker_id, rank)
    epoch = None if state.placement is None else state.placement.epoch
    url = state.joined.urls[rank].rstrip("/").removesuffix("/v1")
    return Target(state.joined, rank, url, key, f"{state.joined.engine}/{rank}", epoch, _note(state))


def _note(state: EngineState) -> str | None:
    """Why an engine's expert term is what it is, when that needs saying."""
    if state.is_one_of_many and (state.layout is None or state.layout.targets_are_ranks):
        return "the engine is one target: which of its ranks a request will live on is not known"
    if state.locality is None:
        return "not priced yet"
    if state.placement is not None and state.priced_epoch != state.placement.epoch:
        return f"not priced yet: the term is that of epoch {state.priced_epoch}"
    return state.locality.note


def _prices(state: EngineState, rank: int, clusters: ClusterModel | None) -> Prices | None:
    """None: unpriced, priced with another number of clusters than there are now, or nobody knows which rank a request will live on."""
    prices = None if state.locality is None or state.is_one_of_many else state.locality.prices
    if prices is None or clusters is None or rank >= len(prices.remote) or prices.remote.shape[1] != clusters.clusters:
        return None
    return prices
