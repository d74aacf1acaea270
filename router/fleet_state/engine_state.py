"""State of one incarnation of an engine, and the values built from all engines of a model: the target table
and the price list. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, FloatArray
from fleet.completions import MAX_DETAIL, shortened
from fleet.facts.engines import EngineJoined
from fleet.layout import EP, Layout
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed, gathered_bytes
from router import kernels
from router.fleet_state.cluster_homes import ClusterHomes, EngineHomes
from router.fleet_state.dispatch_cost import DispatchCost, DispatchPrices, DispatchRules
from router.fleet_state.target_table import (
    MAX_REQUESTS,
    REFERENCE,
    Dialect,
    Excluded,
    RankKey,
    Target,
    TargetTable,
)


class EngineStatus(StrEnum):
    """Status of an engine. Only a live engine is routed to. The value is the reason given for its
    exclusion."""

    NO_HEARTBEAT = "no heartbeat received yet"
    LIVE = "live"
    DEAD = "dead: its heartbeats stopped"
    LEFT = "left"
    UNREACHABLE = "unreachable: a connection to it failed and no heartbeat has been received since"


@dataclass(slots=True)
class EngineState:
    """One incarnation of an engine."""

    joined: EngineJoined
    placement: Placement | None
    layout: Layout | None
    status: EngineStatus = EngineStatus.NO_HEARTBEAT
    locality: DispatchCost | None = None
    """None: not priced yet"""
    priced_epoch: int | None = None
    """placement epoch of `locality`"""
    blocked: str | None = None
    """reason why a live engine cannot be used (its tokenizer is missing)"""
    goodbye: str = ""
    """reason that the engine gave for leaving"""
    rows: list[int] = field(default_factory=list)
    distinct: FloatArray | None = None
    """[K]: experts that a request of each cluster adds to a step of the engine; None: unknown"""
    handover_seconds: float = 0.0
    probed: bool = False
    """probes decide its liveness (`router.upstream.static_backends`), not its heartbeats"""
    homes: EngineHomes = EngineHomes()  # noqa: RUF009 immutable

    def resume(self, old: "EngineState") -> None:
        """Take over the state of an incarnation that joins again. Its prices stand until they are computed
        anew, unless the join describes another engine.
        """
        self.blocked, self.handover_seconds = old.blocked, old.handover_seconds
        self.status = EngineStatus.NO_HEARTBEAT if old.status is EngineStatus.LEFT else old.status
        if old.placement is not None and (
            self.placement is None or old.placement.epoch > self.placement.epoch
        ):
            self.placement, self.layout = old.placement, old.layout
        if len(old.joined.urls) == len(self.joined.urls):
            self.homes = old.homes
            if (old.layout, old.nodes, old.rules, old.joined.shape, old.joined.model) == (
                self.layout,
                self.nodes,
                self.rules,
                self.joined.shape,
                self.joined.model,
            ):
                self.locality, self.priced_epoch = old.locality, old.priced_epoch

    def prices_outlast(self, layout: Layout) -> bool:
        """Return True if the prices may stand in an epoch of this layout until its own are known: some layer
        is whole in both, and few experts move between two epochs.
        """
        if self.locality is None or self.locality.prices is None or self.layout is None:
            return False
        shape = self.joined.shape
        return (
            layout.attention == self.layout.attention and shape is not None and layout.has_whole(shape.layers)
        )

    @property
    def contexts(self) -> dict[str, int]:
        """Token limits of a request, by the name of each served model."""
        return {one.name: one.max_context for one in self.joined.models} or {
            self.joined.model: self.joined.max_context
        }

    @property
    def nodes(self) -> tuple[str, ...]:
        """Machine of each rank that holds experts."""
        return self.joined.nodes or (self.joined.node,) * self.joined.expert_ranks

    @property
    def rules(self) -> DispatchRules:
        """Statement of the engine about the way of tokens to its experts."""
        joined = self.joined
        return DispatchRules(len(joined.urls), joined.dispatch, joined.gathers_all)

    @property
    def ranks(self) -> int:
        """Number of targets of this engine: its ranks, or 1 when the engine is one target. Ranks behind one
        URL are targets only if a header names them.
        """
        one_target = self.layout is not None and not self.layout.targets_are_ranks
        told_apart = bool(self.joined.rank_header) or len(set(self.joined.urls)) > 1
        return len(self.joined.urls) if told_apart and not one_target else 1

    @property
    def shared_ranks(self) -> int:
        """`EngineJoined.shared_ranks` of the served layout."""
        return self.joined.shared_ranks(self.layout)

    @property
    def kv_blocks(self) -> int:
        """KV blocks of a target; 0: unknown."""
        return self.joined.target_kv_blocks(self.layout)

    @property
    def stated_speed(self) -> EngineSpeed | None:
        """`EngineJoined.target_speed` of the served layout."""
        return self.joined.target_speed(self.layout)

    @property
    def speed(self) -> EngineSpeed:
        """The stated speed, or the reference."""
        return self.stated_speed or REFERENCE

    @property
    def max_requests(self) -> int:
        """Concurrent requests that a target declares; MAX_REQUESTS: none."""
        declared = self.joined.max_requests
        return MAX_REQUESTS if declared is None else declared * self.shared_ranks

    @property
    def is_one_of_many(self) -> bool:
        """True if the engine is one target although it has several ranks."""
        return self.ranks == 1 < len(self.joined.urls)

    @property
    def reads(self) -> float:
        """Share of a step's distinct experts that each rank reads: in whole layers because the ranks read
        theirs in parallel, in sharded ones because each reads its part of every expert. 1 if the price is
        that of a part. 0 without experts.
        """
        if self.joined.shape is None:
            return 0.0
        of_parts = self.stated_speed is not None and self.stated_speed is self.joined.tp_speed
        return 1.0 if of_parts else 1.0 / self.joined.expert_ranks

    @property
    def gather_token(self) -> float:
        """Seconds that a token of any rank takes in the collectives of the sharded layers."""
        shape, sharded = self.joined.shape, (self.layout or EP).sharded
        if shape is None or not sharded:
            return 0.0
        return self.speed.gather_byte * gathered_bytes(shape, self.joined.expert_ranks, len(sharded))

    @property
    def homes_now(self) -> ClusterHomes | None:
        """Homes that requests are sent to; None: there are none, or no layer is whole, so that all ranks are
        equally near."""
        shape = self.joined.shape
        has_whole = shape is None or (self.layout or EP).has_whole(shape.layers)
        return self.homes.now if has_whole else None

    @property
    def dialect(self) -> Dialect:
        return "ids" if self.joined.capabilities.token_ids and self.joined.tokenizer is not None else "text"

    @property
    def obstacle(self) -> str | None:
        """Reason why no request can be sent here now."""
        if self.status is EngineStatus.LIVE:
            return self.blocked
        left = self.status is EngineStatus.LEFT and self.goodbye
        return f"left: {shortened(self.goodbye, MAX_DETAIL)}" if left else self.status.value


class Versions(NamedTuple):
    """Versions of prices and homes, by engine."""

    prices: dict[str, int | None]
    """placement epoch; None: not priced yet, or the placement is unknown"""
    homes: dict[str, tuple[int, int]]
    """version and placement epoch of the homes that match these prices; engines without homes are left out"""
    coming: dict[str, tuple[int, int]]
    """versions of homes that wait for their epoch"""


class PriceList:
    """Prices of a model's targets per token of each cluster, in the order of its target table. One matrix, so
    that a decision needs one product. All are 0 where `priced`, bool [targets], is false.
    """

    def __init__(self, target_table: TargetTable, clusters: int) -> None:
        targets = len(target_table.targets)
        self.clusters = clusters
        self.priced = np.zeros(targets, np.bool_)
        self._engine = target_table.engine
        self._by_cluster = np.zeros((clusters, 3 * targets + len(target_table.first)), np.float32)
        self.flat = self._by_cluster.T
        """[3 * targets + engines, K]: the rows of the next four, concatenated"""
        self.remote, self.nodes, self.local = self.flat[: 3 * targets].reshape(3, targets, clusters)
        """[targets, K]: distinct remote ranks and nodes, and local share, as in
        `dispatch_cost.DispatchPrices`
        """
        self.distinct = self.flat[3 * targets :]
        """[engines, K]: experts added to a step"""
        self.homes: NDArray[np.float32] | None = None
        """[targets, K]: `cluster_homes.ClusterHomes.lift`; None: there are no homes"""
        self.versions = Versions({}, {}, {})
        self._prior: tuple[Float32Array, FloatArray] | None = None

    def of(self, weights: Float32Array) -> FloatArray:
        """Return the expert load of a request with weights [K]: remote ranks, remote nodes, local share and
        added experts, float64 [4, targets].
        """
        rows, targets = len(self.flat), len(self.priced)
        mixed = np.empty((4, targets))
        library = kernels.compiled()
        if library is not None:
            library.mixed(self.clusters, rows, self._by_cluster, weights, targets, self._engine, mixed)
        else:
            found = np.zeros(rows, np.float32)
            for prices, weight in zip(self._by_cluster, weights, strict=True):
                found += prices * weight
            mixed[:3], mixed[3] = found[: 3 * targets].reshape(3, targets), found[3 * targets :][self._engine]
        return mixed

    def home(self, weights: Float32Array) -> FloatArray | None:
        """Return the planned share of each target as a multiple of its even share, for weights [K], float64
        [targets]; None without homes.
        """
        return None if self.homes is None else (self.homes @ weights).astype(np.float64)

    def prior_local(self, shares: Float32Array) -> FloatArray:
        """Return the local share of the traffic's mix [K], float64 [targets]. Computed once per mix."""
        if self._prior is None or self._prior[0] is not shares:
            self._prior = shares, (self.local @ shares).astype(np.float64)
        return self._prior[1]


def build(model: str, engines: list[EngineState]) -> TargetTable:
    """Build the target table from the engines that can serve the model in one dialect and with one tokenizer.
    Ids take precedence over text, the engine that joined first over later ones.
    """
    serving = [state for state in engines if model in state.contexts and state.obstacle is None]
    dialect: Dialect = "ids" if any(state.dialect == "ids" for state in serving) else "text"
    # Text engines that return ids get the client's text; the tokenizer is then for hashing and pricing only.
    tokenizer = next(
        (
            state.joined.tokenizer
            for state in serving
            if state.joined.tokenizer is not None
            and (state.joined.capabilities.returns_ids if dialect == "text" else state.dialect == "ids")
        ),
        None,
    )
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
    if model not in state.contexts:
        return f"serves another model: {', '.join(state.contexts)}"
    if state.obstacle is not None:
        return state.obstacle
    if state.dialect != dialect:
        return "takes no token ids, and other engines of this model do"
    if dialect == "ids" and state.joined.tokenizer != tokenizer:
        return "its tokenizer differs from that of the engine that joined first"
    return None


def _columns(
    model: str,
    dialect: Dialect,
    tokenizer: str | None,
    engines: list[EngineState],
    excluded: tuple[Excluded, ...],
) -> TargetTable:
    ranks = [(state, rank) for state in engines for rank in range(state.ranks)]
    speeds = [state.speed for state, _ in ranks]
    members = np.array([state.ranks for state in engines], np.intp)
    engine, first = np.repeat(np.arange(len(engines)), members), np.cumsum(members) - members
    targets = tuple(_target(state, rank) for state, rank in ranks)
    sizes = [state.joined.block_size for state, _ in ranks]
    contexts = [state.contexts[model] for state, _ in ranks]
    kv_blocks = [state.kv_blocks or inf for state, _ in ranks]
    shared = [state.shared_ranks for state, _ in ranks]
    requests = [state.max_requests for state, _ in ranks]
    return TargetTable(
        model=model,
        dialect=dialect,
        tokenizer=tokenizer,
        sent_tokenizer=tokenizer if dialect == "ids" else None,
        targets=targets,
        excluded=excluded,
        index={target.key: at for at, target in enumerate(targets)},
        rows=np.array([state.rows[rank] for state, rank in ranks], np.intp),
        block_size=np.array(sizes, np.int64),
        max_context=np.array(contexts, np.int64),
        ranks=np.array(shared, np.int64),
        max_requests=np.array(requests, np.int64),
        stated=np.array([state.stated_speed is not None for state, _ in ranks], np.bool_),
        prefill_token_s=column(speed.prefill_token for speed in speeds),
        prefill_pair_s=column(speed.prefill_pair for speed in speeds),
        step_s=column(speed.step for speed in speeds),
        decode_sequence_s=column(speed.decode_sequence for speed in speeds),
        decode_block_s=column(speed.decode_block for speed in speeds),
        decode_token_block_s=column(
            speed.decode_block / size for speed, size in zip(speeds, sizes, strict=True)
        ),
        dispatch_s=column(speed.dispatch for speed in speeds),
        dispatch_node_s=column(speed.dispatch_node for speed in speeds),
        expert_read_s=column(
            speed.expert_read * state.reads for speed, (state, _) in zip(speeds, ranks, strict=True)
        ),
        gather_token_s=column(state.gather_token for state, _ in ranks),
        engine=engine,
        first=first,
        group=np.stack([engine, engine + len(engines)]),
        group_first=np.concatenate([first, first + len(ranks)]),
        apart=bool((members == 1).any()),
        pairs=any(speed.prefill_pair for speed in speeds),
        far=any(speed.dispatch_node for speed in speeds),
        reads=any(speed.expert_read and state.reads for speed, (state, _) in zip(speeds, ranks, strict=True)),
        gathers=any(state.gather_token for state in engines),
        in_lockstep=np.repeat(members > 1, members).astype(np.float64)
        if members.max(initial=0) > 1
        else None,
        passes_fields=any(state.joined.capabilities.passes_fields for state in engines),
        approximate=np.array([not state.joined.capabilities.kv_events for state, _ in ranks], np.bool_),
        block_sizes=tuple(sorted(set(sizes))),
        all_at=np.arange(len(ranks)),
        guessed=tuple(target.key for target in targets if not target.engine.capabilities.kv_events),
        largest_context=max(contexts, default=0),
        smallest_context=min(contexts, default=0),
        kv_blocks=np.array(kv_blocks, np.float64),
        min_kv_blocks=min(kv_blocks, default=inf),
        min_requests=min(requests, default=MAX_REQUESTS),
        adapter=model
        if any(one.adapter for state in engines for one in state.joined.models if one.name == model)
        else "",
    )


def column(values: Iterable[float]) -> FloatArray:
    return np.fromiter(values, np.float64)


def _target(state: EngineState, rank: int) -> Target:
    key: RankKey = (state.joined.worker_id, rank)
    epoch = None if state.placement is None else state.placement.epoch
    return Target(
        engine=state.joined,
        rank=rank,
        url=state.joined.urls[rank].rstrip("/").removesuffix("/v1"),
        key=key,
        name=f"{state.joined.engine}/{rank}",
        epoch=epoch,
        note=note(state),
        stated_speed=state.stated_speed,
        max_batch_tokens=state.joined.max_batch_tokens * state.shared_ranks,
    )


def note(state: EngineState) -> str | None:
    """Explain an engine's expert term, if it needs an explanation."""
    if state.is_one_of_many and (state.layout is None or state.layout.targets_are_ranks):
        return "the engine is one target: the rank of a request is not known"
    if state.locality is None:
        return "not priced yet"
    if state.placement is not None and state.priced_epoch != state.placement.epoch:
        return f"not priced yet: the term is that of epoch {state.priced_epoch}"
    return state.locality.note


def price_list(
    target_table: TargetTable, engines: Mapping[int, EngineState], clusters: ClusterModel | None
) -> PriceList:
    """Build the prices of a table's targets, as far as they are known. engines: by worker_id."""
    found = PriceList(target_table, 0 if clusters is None else clusters.clusters)
    for at, target in enumerate(target_table.targets):
        state = engines[target.key[0]]
        prices = _prices(state, target.rank, clusters)
        if prices is not None:
            found.remote[at], found.nodes[at], found.local[at] = (
                prices.remote[target.rank],
                prices.nodes[target.rank],
                prices.local[target.rank],
            )
            found.priced[at] = True
        if state.distinct is not None and len(state.distinct) == found.clusters:
            found.distinct[target_table.engine[at]] = state.distinct
    found.versions = _versions(target_table, engines)
    if clusters is not None:
        found.homes = _homes(target_table, engines, clusters)
    return found


def _versions(target_table: TargetTable, engines: Mapping[int, EngineState]) -> Versions:
    found = Versions({}, {}, {})
    for first in target_table.first.tolist():
        name, state = target_table.targets[first].engine.engine, engines[target_table.targets[first].key[0]]
        found.prices[name] = None if state.locality is None else state.priced_epoch
        for homes, versions_by_engine in ((state.homes_now, found.homes), (state.homes.coming, found.coming)):
            if homes is not None:
                versions_by_engine[name] = homes.version, homes.epoch
    return found


def _homes(
    target_table: TargetTable, engines: Mapping[int, EngineState], clusters: ClusterModel
) -> NDArray[np.float32] | None:
    """Return the homes, float32 [targets, K]; None if no engine has any. Clusters keep their meaning across
    versions, unless their number changes.
    """
    found = None
    for at, target in enumerate(target_table.targets):
        state = engines[target.key[0]]
        homes = None if state.is_one_of_many else state.homes_now
        lift = None if homes is None else homes.lift
        if lift is not None and lift.shape[1] == clusters.clusters:
            if found is None:
                found = np.ones((len(target_table.targets), clusters.clusters), np.float32)
            found[at] = lift[target.rank]
    return found


def _prices(state: EngineState, rank: int, clusters: ClusterModel | None) -> DispatchPrices | None:
    """Return the prices of a rank; None if it is unpriced, was priced with another number of clusters, or the
    rank of a request is not known.
    """
    prices = None if state.locality is None or state.is_one_of_many else state.locality.prices
    if (
        prices is None
        or clusters is None
        or rank >= len(prices.remote)
        or prices.remote.shape[1] != clusters.clusters
    ):
        return None
    return prices
