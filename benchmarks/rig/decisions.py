"""Fleets for decision benchmarks: engines of eight ranks of a 58 x 256 model, prompts that are partly in
ranks' caches, prediction tables that know the same part."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.memory import MemoryBroker
from fleet.blocks import BLOCK_SIZE, local_hashes, sequence_hashes
from fleet.experts import ModelShape
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.facts.engines import EngineJoined
from fleet.layout import DP_ATTENTION, EP
from fleet.placement import linear
from fleet.prediction import PATTERNS, SOURCES
from fleet.signatures import ClusterModel, pack
from router.config import RouterConfig
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.reservations import Booking
from router.prediction.predictor import keys_of
from router.prediction.table_replica import TableReplica, read
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.routing_request import RoutingRequest
from router.service import RouterService

RANKS, CLUSTERS, VOCABULARY = 8, 32, 50_000
"""ranks of an engine"""
NODES = (0, 0, 0, 0, 1, 1, 1, 1)
"""machine of each of an engine's ranks"""
LAYERS, EXPERTS, TOP_K = 58, 256, 8
KNOWN_BLOCKS = 300_000
SHARED_TOKENS = 256
"""Common prefix of every cached prompt, held by all ranks."""
KV_BLOCKS = 100_000
SHAPE = ModelShape(
    layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=7168, expert_intermediate=2048, dtype="float8_e4m3fn"
)
MODEL, DIGEST, OUTPUT = "m", "f" * 64, 100
KEYS = keys_of("a conversation", "a tenant", MODEL, "/v1/chat/completions")
OPEN = 3
"""concurrent requests per rank"""

Rank = tuple[int, int]


class Held(NamedTuple):
    """Ranks that cache the first `tokens` of a prompt."""

    ids: list[int]
    tokens: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True)
class Prompts:
    """Prompts of one length with a cached `share`: a common prefix on every rank, the rest on a rank of every
    other engine."""

    length: int
    share: float
    ids: list[list[int]]

    def held(self, engines: int) -> Iterator[Held]:
        tokens = int(self.share * self.length)
        if tokens:
            everybody = tuple((engine, rank) for engine in range(1, engines + 1) for rank in range(RANKS))
            yield Held(self.ids[0], min(tokens, SHARED_TOKENS), everybody)
            for at, ids in enumerate(self.ids):
                yield Held(
                    ids, tokens, tuple((engine, (at + engine) % RANKS) for engine in range(1, engines + 1, 2))
                )


def prompts(chance: np.random.Generator, length: int, share: float, count: int) -> Prompts:
    shared = chance.integers(0, VOCABULARY, SHARED_TOKENS if share else 0).tolist()
    return Prompts(
        length,
        share,
        [shared + chance.integers(0, VOCABULARY, length - len(shared)).tolist() for _ in range(count)],
    )


def fresh(ids: list[int]) -> list[int]:
    """Return the same ids as a new list, recently written, as a tokenizer returns them."""
    return array("I", ids).tolist()


def clusters(chance: np.random.Generator) -> ClusterModel:
    profiles = chance.dirichlet(np.full(EXPERTS, 0.3), size=(CLUSTERS, LAYERS)).astype(np.float32)
    return ClusterModel(1, profiles, np.full(CLUSTERS, 1 / CLUSTERS, np.float32), 0.1)


def tables(chance: np.random.Generator, known: Sequence[Prompts]) -> TableReplica:
    """Return the tracker's tables: KNOWN_BLOCKS unrelated blocks, the blocks of cached parts of prompts, a
    row for every token, a session, a tenant."""
    keys = [
        np.array(_chain(ids)[: int(part.share * len(ids)) // BLOCK_SIZE], np.uint64)
        for part in known
        for ids in part.ids
    ]
    ratios = chance.normal(0, 0.1, (VOCABULARY, CLUSTERS))
    published = TablesPublished(
        model=MODEL,
        version=1,
        clusters=1,
        shares=np.full(CLUSTERS, 1 / CLUSTERS, "<f4").tobytes(),
        trust=dict.fromkeys(SOURCES, 0.5),
        trusts=np.full((PATTERNS, len(SOURCES)), 0.5, "<f4").tobytes(),
        reliability=dict.fromkeys(SOURCES, 0.5),
        gain=0.8,
        buckets=VOCABULARY,
        token_rows=np.arange(VOCABULARY, dtype="<u4").tobytes(),
        token_ratios=ratios.astype("<f2").tobytes(),
        blocks=_rows(chance, np.concatenate([*keys, chance.integers(1, 2**64, KNOWN_BLOCKS, np.uint64)])),
        sessions=_rows(chance, np.array([KEYS.session], np.uint64)),
        tenants=_rows(chance, np.array([KEYS.tenant], np.uint64)),
    )
    return TableReplica(RouterConfig().prediction_bytes).prepare(read(published))


def _rows(chance: np.random.Generator, keys: NDArray[np.uint64]) -> KeyedRows:
    packed = pack(chance.dirichlet(np.full(CLUSTERS, 0.1), size=len(keys)))
    rows = np.concatenate([packed, np.full((len(keys), 1), 200, "<u4").view(np.uint8)], axis=1)
    return KeyedRows(keys=keys.astype("<u8").tobytes(), rows=rows.tobytes())


def _chain(ids: list[int]) -> list[int]:
    return sequence_hashes(local_hashes(ids))


class Roost:
    """Router with `ranks` known ranks. It decides, books and, OPEN requests per rank later, releases."""

    def __init__(self, ranks: int, model: ClusterModel, predicted: TableReplica) -> None:
        self.engines = ranks // RANKS
        self.router = RouterService(None, MemoryBroker().subjects, RouterConfig(policy="cost"))
        self._prediction = predicted
        self._open: deque[Booking] = deque()
        self._decided = 0
        placement = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS)
        view, found = self.router.view, locality(NODES, SHAPE, EP, placement, model)
        view.learn(MODEL, model)
        for engine in range(1, self.engines + 1):
            urls = tuple(f"http://h{engine}:{rank}" for rank in range(RANKS))
            sizes = {
                "block_size": BLOCK_SIZE,
                "kv_blocks": KV_BLOCKS,
                "max_context": 200_000,
                "max_batch_tokens": 8192,
            }
            nodes = tuple(f"n{engine}-{node}" for node in NODES)
            about = {
                "model": MODEL,
                "node": nodes[0],
                "nodes": nodes,
                "urls": urls,
                "attention": DP_ATTENTION,
                "shape": SHAPE,
                "placement": placement.record(),
                "tokenizer": DIGEST,
            }
            view.join(EngineJoined(engine=f"e{engine}", worker_id=engine, **about, **sizes), 0.0)  # type: ignore[arg-type]
            view.sign_of_life(engine, 0.0)
            view.price(engine, 0, found)
        self.predict(on=True)

    def settle(self, ids: list[int]) -> None:
        """Decide until the first bookings are released: the router then no longer grows with each
        decision."""
        first = f"{self._decided + 1:016x}"
        self.decide(ids)
        while self.router.scheduler.kept.get(first) is not None:
            self.decide(ids)

    def predict(self, *, on: bool) -> None:
        """Turn the tracker's tables on or off."""
        predictor = self.router.scheduler.predictor
        predictor.keep_only(set())
        if on:
            predictor.replace(MODEL, self._prediction)

    def hold(self, held: Held) -> None:
        """Publish the ranks' cached blocks."""
        local = local_hashes(held.ids[: held.tokens])
        blocks = tuple(
            KvBlock(chained, own) for chained, own in zip(sequence_hashes(local), local, strict=True)
        )
        event = KvChange(stored=KvStored(blocks=blocks))
        self.router.scheduler.kv.apply(
            RoutedKvEvent(worker_id=worker, event=KvEvent(event_id=1, dp_rank=rank, data=event))
            for worker, rank in held.ranks
        )

    def overlap(self, ids: list[int]) -> dict[Rank, int]:
        """Return the blocks of a prompt that each rank holds."""
        return self.router.scheduler.kv.block_index.overlaps(TokenPrompt(ids).chained(BLOCK_SIZE))

    def decide(self, ids: list[int]) -> None:
        """Run one decision: from token ids to a booking, and the release of an older one."""
        need = RoutingRequest(MODEL, TokenPrompt(ids), len(ids) + OUTPUT, OUTPUT, DIGEST, keys=KEYS)
        self._decided += 1
        decision = self.router.decide(need, f"{self._decided:016x}")
        self._open.append(self.router.scheduler.book(decision, need.prompt, self.router.clock()))
        if len(self._open) > OPEN * RANKS * self.engines:
            self.router.release(self._open.popleft())
