"""One routing decision: 64 ranks (8 engines of 8) of a 58 x 256 model, 32 clusters, with prediction and without, in turn.

Without: no tables of the tracker are there, and experts are not priced. With: 300,000 known blocks, a token table of 50,000 rows, and a
session and a tenant row for every request; of `half known` prompts the first half of the blocks is known, and cached on every other engine.
Timed is everything from the ids of the prompt to the decision but the local block hashes, which the KV index needs in any case.

    python -m benchmarks.deciding --quick
"""

import os
import time
from collections.abc import Callable

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, percentile
from bus.memory import MemoryBroker
from fleet.blocks import local_hashes, sequence_hashes
from fleet.events import EngineJoined, KeyedRows, KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent, TablesPublished
from fleet.experts import ModelShape
from fleet.layout import EP
from fleet.placement import Placement, linear
from fleet.prediction import SOURCES
from fleet.signatures import ClusterModel, pack
from router.config import RouterConfig
from router.foresight import keys_of
from router.locality import locality
from router.picker import Need
from router.prompt import TokenPrompt
from router.replica import Replica, read
from router.service import RouterService

ENGINES, RANKS, CLUSTERS, VOCABULARY = 8, 8, 32, 50_000
LAYERS, EXPERTS, TOP_K = 58, 256, 8
KNOWN_BLOCKS = 300_000
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=7168, expert_intermediate=2048, dtype="float8_e4m3fn")
KEYS = keys_of("a conversation", "a tenant", "m", "/v1/chat/completions")
DIGEST = "f" * 64
P50_LIMIT, P99_LIMIT, ADDED_LIMIT, PRICING_LIMIT = 150.0, 400.0, 60.0, 100.0
"""microseconds for a prompt of 4,096 tokens that is half known; microseconds added to a cold one; milliseconds for an engine of 16 ranks"""


class Setting:
    """A router that knows everything but the tables, and the tables."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.chance = np.random.default_rng(0)
        profiles = self.chance.dirichlet(np.full(EXPERTS, 0.3), size=(CLUSTERS, LAYERS)).astype(np.float32)
        self.clusters = ClusterModel(1, profiles, np.full(CLUSTERS, 1 / CLUSTERS, np.float32), 0.1)
        self.router = RouterService(None, MemoryBroker().subjects, RouterConfig())
        self._join()
        self.prompts = {length: self.prompt(length) for length in lengths}
        for ids in self.prompts.values():
            self._cache(ids)
        self.tables = self._tables()

    def prompt(self, length: int) -> list[int]:
        return [int(token) for token in self.chance.integers(0, VOCABULARY, length)]

    def _join(self) -> None:
        placement = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS)
        view, found = self.router.view, locality(RANKS, SHAPE, EP, placement, self.clusters)
        view.learn("m", self.clusters)
        for engine in range(1, ENGINES + 1):
            urls = tuple(f"http://h{engine}:{rank}" for rank in range(RANKS))
            sizes = {"block_size": 16, "kv_blocks": 10_000, "max_context": 200_000, "max_batch_tokens": 8192}
            about = {"model": "m", "node": "n", "urls": urls, "layout": EP, "shape": SHAPE, "placement": placement.record(), "tokenizer": DIGEST}
            view.join(EngineJoined(engine=f"e{engine}", worker_id=engine, **about, **sizes), 0.0)  # type: ignore[arg-type]
            view.heard(engine, 0.0)
            view.price(engine, 0, found)

    def _cache(self, ids: list[int]) -> None:
        """The first half of a prompt lies in a rank of every other engine."""
        local = local_hashes(ids)
        half = len(local) // 2
        blocks = tuple(KvBlock(chained, own) for chained, own in zip(sequence_hashes(local)[:half], local[:half], strict=True))
        for engine in range(1, ENGINES + 1, 2):
            change = KvChange(stored=KvStored(blocks=blocks))
            self.router.picker.kv.apply((RoutedKvEvent(worker_id=engine, event=KvEvent(event_id=1, dp_rank=engine % RANKS, data=change)),))

    def _tables(self) -> Replica:
        known = [np.array(sequence_hashes(local_hashes(ids))[: len(ids) // 32], np.uint64) for ids in self.prompts.values()]
        keys = np.concatenate([*known, self.chance.integers(1, 2**64, KNOWN_BLOCKS, np.uint64)])
        ratios = self.chance.normal(0, 0.1, (VOCABULARY, CLUSTERS))
        published = TablesPublished(
            model="m",
            version=1,
            clusters=1,
            shares=self.clusters.shares.astype("<f4").tobytes(),
            trust=dict.fromkeys(SOURCES, 0.5),
            reliability=dict.fromkeys(SOURCES, 0.5),
            gain=0.8,
            buckets=VOCABULARY,
            token_rows=np.arange(VOCABULARY, dtype="<u4").tobytes(),
            token_ratios=ratios.astype("<f2").tobytes(),
            blocks=self._rows(keys),
            sessions=self._rows(np.array([KEYS.session], np.uint64)),
            tenants=self._rows(np.array([KEYS.tenant], np.uint64)),
        )
        return self.router.picker.foresight.prepare(read(published))

    def _rows(self, keys: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> KeyedRows:
        packed = pack(self.chance.dirichlet(np.full(CLUSTERS, 0.1), size=len(keys)))
        rows = np.concatenate([packed, np.full((len(keys), 1), 200, "<u4").view(np.uint8)], axis=1)
        return KeyedRows(keys=keys.astype("<u8").tobytes(), rows=rows.tobytes())

    def predicting(self, on: bool) -> None:
        foresight = self.router.picker.foresight
        foresight.keep_only(set())
        if on:
            foresight.replace("m", self.tables)

    def decide(self, ids: list[int]) -> float:
        """Microseconds of one decision."""
        prompt = TokenPrompt(ids)
        prompt.hashes(16)
        need = Need("m", prompt, len(ids) + 100, 100, DIGEST, keys=KEYS)
        began = time.perf_counter()
        self.router.decide(need, "d")
        return 1e6 * (time.perf_counter() - began)


def timed(setting: Setting, ids: Callable[[], list[int]], turns: int) -> dict[bool, list[float]]:
    """Microseconds without (False) and with prediction, in turns of ten."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns // 10):
        on = bool(turn % 2)
        setting.predicting(on)
        asked = ids()
        setting.decide(asked)
        taken[on] += [setting.decide(asked) for _ in range(10)]
    return taken


def pricing(clusters: ClusterModel, ranks: int, extra: int) -> float:
    """Milliseconds to price all clusters for an engine whose ranks hold `extra` replicas each, at random."""
    chance = np.random.default_rng(1)
    own = EXPERTS // ranks
    slots = np.full((LAYERS, ranks, own + extra), -1, np.int16)
    for layer in range(LAYERS):
        slots[layer, :, :own] = chance.permutation(EXPERTS).reshape(ranks, own)
        for rank in range(ranks):
            slots[layer, rank, own:] = chance.choice(np.setdiff1d(np.arange(EXPERTS), slots[layer, rank, :own]), extra, replace=False)
    placement = Placement(slots.reshape(LAYERS, -1), experts=EXPERTS, ranks=ranks)
    placement.share  # noqa: B018, made once per placement, whoever prices it
    began = time.perf_counter()
    locality(ranks, SHAPE, EP, placement, clusters)
    return 1e3 * (time.perf_counter() - began)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Time of a decision with and without prediction, by prompt length, and of pricing a placement."""
    lengths, turns = (256, 1024, 4096, 16_384), 400 if quick else 2000
    setting = Setting(lengths)
    report = Report("one decision over 64 ranks, us", ["prompt", "without p50", "p99", "with p50", "p99", "added p50"])
    decided: dict[tuple[str, int], tuple[float, float, float]] = {}
    for name in ("cold", "half known"):
        for length in lengths:
            ids = (lambda length=length: setting.prompt(length)) if name == "cold" else (lambda length=length: setting.prompts[length])
            taken = timed(setting, ids, turns)
            (off, off_99), (on, on_99) = ((percentile(some, 0.5), percentile(some, 0.99)) for some in (taken[False], taken[True]))
            report.add(f"{name}, {length} tokens", off, off_99, on, on_99, on - off)
            decided[name, length] = on, on_99, on - off
    worst = 0.0
    for ranks, extra in ((16, 0), (16, 4), (64, 4)):
        taken_ms = min(pricing(setting.clusters, ranks, extra) for _ in range(3))
        report.notes.append(f"pricing {CLUSTERS} clusters for {ranks} ranks with {extra} replicas each: {taken_ms:.0f} ms")
        worst = max(worst, taken_ms) if ranks == 16 else worst
    report.notes.append(
        f"tables of {KNOWN_BLOCKS:,} blocks and {VOCABULARY:,} tokens: {setting.tables.stored_bytes / 1e6:.0f} MB; load average {os.getloadavg()[0]:.1f}"
    )
    p50, p99, _ = decided["half known", 4096]
    report.targets += [
        Target("pricing an engine of 16 ranks", worst, PRICING_LIMIT, at_least=False, unit=" ms"),
        Target("prediction adds to a cold decision of 1,024 tokens", decided["cold", 1024][2], ADDED_LIMIT, at_least=False, unit=" us"),
        Target("decision, 4,096 tokens, half known, p99", p99, P99_LIMIT, at_least=False, unit=" us"),
        Target("decision, 4,096 tokens, half known, p50", p50, P50_LIMIT, at_least=False, unit=" us"),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
