"""Cache hits lost to tenants' cache salts: conversations with a common beginning, in one cache and in one per
tenant.

Each request is decided by a router over eight ranks (the cost policy, exact KV events) and computed by the
chosen rank's own KV cache (pages, eviction, comparison of tokens and parents). Time does not pass, and eight
requests run at once. All conversations begin with one system prompt; a tenant has 64 / tenants of them, which
take turns at random, and a turn adds 160 tokens. Hits are cached prompt tokens over prompt tokens. "large"
caches hold everything, "small" ones a quarter of it.

    python -m benchmarks.tenants --quick
"""

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from bus.memory import MemoryBroker
from engine_adapter.batching.kv_cache import BlockTable, KvCache, identify
from fleet.blocks import salted_seed
from fleet.facts.dynamo_kv import KvEvent, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.timing import EngineSpeed
from router.access.tenancy import cache_salt
from router.config import RouterConfig
from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Owner
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog

RANKS, BLOCK, DIGEST, MODEL, WORKER = 8, 16, "f" * 64, "m", 1
SYSTEM, TURN, CONVERSATIONS, OPEN = 1_024, 160, 64, 8
"""Tokens of the system prompt and of a turn; conversations of all tenants; concurrent requests."""
MIN_KEPT, MAX_SLOWER = {16: 0.9, 64: 0.7}, 1.25


class Open(NamedTuple):
    """Running request."""

    booking: Booking
    rank: int
    table: BlockTable


class Fleet:
    """One engine of RANKS ranks with real KV caches, behind a router."""

    def __init__(self, pages: int) -> None:
        self.service = RouterService(None, MemoryBroker().subjects, RouterConfig())
        self.caches = [KvCache(pages, BLOCK) for _ in range(RANKS)]
        self.open: deque[Open] = deque()
        self.prompt_tokens = self.cached_tokens = 0
        urls = tuple(f"http://h:{rank}" for rank in range(RANKS))
        about = {"block_size": BLOCK, "kv_blocks": pages, "max_context": 100_000, "max_batch_tokens": 8192}
        isolating = Capabilities(isolates_tenants=True)
        self.service.view.join(
            EngineJoined(
                engine="e",
                worker_id=WORKER,
                model=MODEL,
                node="n",
                urls=urls,
                tokenizer=DIGEST,
                speed=EngineSpeed(),
                capabilities=isolating,
                **about,
            ),
            0.0,
        )
        self.service.view.sign_of_life(WORKER, 0.0)

    def ask(self, ids: list[int], salt: str) -> None:
        """Run one request, from its decision to the rank's events."""
        need = RoutingRequest(
            MODEL, TokenPrompt(ids, salted_seed(salt)), len(ids) + 1, TURN, DIGEST, owner=Owner("", salt)
        )
        decision, booking = self.service.book(
            RequestLog("r", "d", "/v1/completions", 0.0), need, "", FIRST_TRY
        )
        cache, blocks = self.caches[decision.target.rank], identify(ids, BLOCK, salt)
        table = cache.open(blocks[: (len(ids) - 1) // BLOCK])
        self.prompt_tokens += len(ids)
        self.cached_tokens += len(table.pages) * BLOCK
        if not cache.extend(table, cache.blocks_for(len(ids))):
            raise RuntimeError(
                f"{len(ids)} tokens do not fit beside {OPEN} others: the caches are too small for the case"
            )
        cache.register(table, blocks, len(blocks))
        self.service.first_token(booking)
        self.open.append(Open(booking, decision.target.rank, table))
        self.tell(decision.target.rank)
        if len(self.open) > OPEN:
            self.end(self.open.popleft())

    def end(self, one: Open) -> None:
        self.caches[one.rank].close(one.table)
        self.service.release(one.booking)
        self.tell(one.rank)

    def tell(self, rank: int) -> None:
        """Apply the rank's changes to the router's index."""
        changes = self.caches[rank].take_changes()
        self.service.scheduler.kv.apply(
            [
                RoutedKvEvent(worker_id=WORKER, event=KvEvent(event_id=1, dp_rank=rank, data=change))
                for change in changes
            ]
        )


def hits(tenants: int, turns: int, pages: int, *, salted: bool) -> tuple[float, int]:
    """Return the share of prompt tokens that were cached, and the number computed."""
    chance, fleet = np.random.default_rng(11), Fleet(pages)
    system = chance.integers(0, 50_000, SYSTEM).tolist()
    said = [list(system) for _ in range(CONVERSATIONS)]
    for speaker in chance.permutation(np.repeat(np.arange(CONVERSATIONS), turns)).tolist():
        said[speaker] += chance.integers(0, 50_000, TURN).tolist()
        fleet.ask(
            list(said[speaker]), cache_salt(b"key", f"tenant-{speaker % tenants}", None) if salted else ""
        )
    return fleet.cached_tokens / fleet.prompt_tokens, fleet.prompt_tokens - fleet.cached_tokens


def hashing_us(salts: tuple[str, ...], repeats: int) -> list[float]:
    """Return microseconds to hash a new prompt of 4,096 tokens, with its seed, by salt; measured
    alternately."""
    times: list[list[float]] = [[] for _ in salts]
    for at in range(repeats):
        ids = list(range(at, at + 4_096))
        for taken, salt in zip(times, salts, strict=True):
            started = time.perf_counter()
            TokenPrompt(ids, salted_seed(salt)).chained(BLOCK).reach(256)
            taken.append(1e6 * (time.perf_counter() - started))
    return [median(taken) for taken in times]


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure the hits and the hashing time."""
    report = Report(
        "hits that salts cost",
        ["caches", "tenants", "hits, one cache", "hits, one per tenant", "kept", "computed tokens, times"],
    )
    turns = 4 if quick else 10
    everything = CONVERSATIONS * (SYSTEM + turns * TURN) // BLOCK
    kept: dict[tuple[str, int], float] = {}
    for name, pages in (("large", everything), ("small", everything // (4 * RANKS) + OPEN * 200)):
        for tenants in (1, 4, 16, 64):
            (common, computed), (own, again) = (
                hits(tenants, turns, pages, salted=salted) for salted in (False, True)
            )
            kept[name, tenants] = own / common
            report.add(name, tenants, common, own, own / common, again / computed)
    plain, salted = hashing_us(("", "a" * 64), 200 if quick else 1_000)
    report.notes.append(
        f"hashes of 4,096 new tokens: {plain:.0f} us without a salt, {salted:.0f} us with one"
    )
    report.targets.append(Target("hits of one tenant with a salt / without", kept["large", 1], 0.99))
    report.targets.append(Target("hits kept by 16 tenants, everything fits", kept["large", 16], MIN_KEPT[16]))
    report.targets.append(
        Target(
            "hits kept by 64 tenants of one conversation, everything fits", kept["large", 64], MIN_KEPT[64]
        )
    )
    report.targets.append(
        Target("time of salted hashes / of those without", salted / plain, MAX_SLOWER, at_least=False)
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
