"""Static backends: cost of the approximate prefix index by block size, and how well requests stay with their
prefix.

Routing is simulated on a virtual clock: two equal servers that share nothing, groups of requests with a
common prefix, streams, clients that send their next request at once. A server computes prompts one after
another and reuses earlier ones; its steps have noise per request. "assumed" is the former price of servers
without a stated speed: a small CPU engine, corrected by a factor of four at most, each server separately.
Cached is the share of prompt tokens that servers had already; the ideal is a single server.

    python -m benchmarks.backends --quick
"""

import heapq
import random
import time
from typing import NamedTuple

import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from bus.memory import MemoryBroker
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.timing import EngineSpeed
from router.config import Policy, RouterConfig
from router.feedback.decision_feedback import TICK_SECONDS
from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import BYTES_PER_TOKEN, TextPrompt
from router.scheduling.routing_request import FIRST_TRY, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog

MODEL, UNLIMITED = "m", 2**31 - 1
TEXT_ONLY = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
BLOCKS, KILOBYTES = (64, 32, 16), (8, 32, 400)
PREFIXES, REQUESTS, CLIENTS, OUTPUT = 8, 10, 4, 48
"""Few requests per prefix: servers of endless memory have all prefixes in the end, wherever requests go."""
QUESTION_BYTES = 60
PREFILL_S, STEP_S, SEQUENCE_S, OVERHEAD_S, NOISE = 1e-4, 1.2e-2, 2e-4, 5e-3, 0.05
"""of the simulated servers: seconds per prompt token, per step, added to a step by each stream, per request;
relative deviation of a request's steps"""
MAX_MS, MAX_SKEW, MIN_GAINED = 1.0, 0.6, {200: 0.99, 950: 1.02}
"""limits; MIN_GAINED by bytes of a prefix: a short prefix is worth less than an even load"""


def service_of(
    policy: Policy, block_size: int, speed: EngineSpeed | None, servers: int
) -> tuple[RouterService, list[float]]:
    """Return a router with live servers, and its clock as a list of one number."""
    now = [0.0]
    service = RouterService(
        None,
        MemoryBroker().subjects,
        RouterConfig(policy=policy),
        clock=lambda: now[0],
        chance=random.Random(1),
    )
    for number in range(1, servers + 1):
        joined = EngineJoined(
            engine=f"s{number}",
            worker_id=number,
            model=MODEL,
            node="n",
            urls=(f"http://h{number}",),
            block_size=block_size,
            kv_blocks=0,
            max_context=UNLIMITED,
            max_batch_tokens=UNLIMITED,
            speed=speed,
            capabilities=TEXT_ONLY,
        )
        service.view.join(joined, 0.0, probed=True)
        service.view.sign_of_life(number, 0.0)
    return service, now


def guess_ms(block_size: int, size: int, repeats: int) -> float:
    """Return the median processor time, in milliseconds, to decide on and book a new prompt."""
    service, _ = service_of("cost", block_size, None, 4)
    dice, times = random.Random(size), []
    for number in range(repeats):
        prompt = TextPrompt(dice.randbytes(size), MODEL)
        started = time.thread_time()
        decision = service.scheduler.decide(
            RoutingRequest(MODEL, prompt, 0, OUTPUT, None), f"d{number}", number, 0.0
        )
        service.scheduler.reservations.release(service.scheduler.book(decision, prompt, 0.0))
        times.append(1e3 * (time.thread_time() - started))
    return median(times)


class Outcome(NamedTuple):
    cached: float
    """share of prompt tokens"""
    together: int
    """groups with all requests but one on the same server"""
    most: float
    """share of requests on the busier server"""


class _Servers:
    """Simulated behaviour of the servers."""

    def __init__(self, count: int, dice: random.Random) -> None:
        self._dice = dice
        self._free_at, self._running = [0.0] * count, [0] * count
        self._seen: list[set[bytes]] = [set() for _ in range(count)]
        self.tokens, self.cached = 0, 0

    def take(self, server: int, now: float, prefix: bytes, size: int) -> tuple[float, float]:
        """Return (time of the first token, seconds per step)."""
        had = len(prefix) if prefix in self._seen[server] else 0
        self._seen[server].add(prefix)
        self.tokens, self.cached = self.tokens + size // BYTES_PER_TOKEN, self.cached + had // BYTES_PER_TOKEN
        begins = max(now, self._free_at[server])
        first = self._free_at[server] = begins + OVERHEAD_S + PREFILL_S * ((size - had) // BYTES_PER_TOKEN)
        self._running[server] += 1
        return first, (STEP_S + SEQUENCE_S * self._running[server]) * (1 + self._dice.gauss(0, NOISE))

    def leave(self, server: int) -> None:
        self._running[server] -= 1


def routed(policy: Policy, speed: EngineSpeed | None, prefix_bytes: int, requests: int, seed: int) -> Outcome:
    """Run one case with requests in random order."""
    dice = random.Random(seed)
    service, now = service_of(policy, RouterConfig().backend_block_tokens, speed, 2)
    prefixes = [dice.randbytes(prefix_bytes) for _ in range(PREFIXES)]
    order = [group for group in range(PREFIXES) for _ in range(requests)]
    dice.shuffle(order)
    servers, went = _Servers(2, dice), [[0, 0] for _ in range(PREFIXES)]
    todo: list[tuple[float, int, str, tuple[int, Booking, float, int] | None]] = [
        (0.0, client, "ask", None) for client in range(CLIENTS)
    ]
    heapq.heapify(todo)
    number, refreshed = CLIENTS, 0.0
    while todo:
        now[0], _, what, about = heapq.heappop(todo)
        while refreshed + TICK_SECONDS < now[0]:
            refreshed += TICK_SECONDS
            service.scheduler.speeds.refresh(refreshed)
        if about is None:
            if not order:
                continue
            group = order.pop()
            text = prefixes[group] + dice.randbytes(QUESTION_BYTES)
            request_log = RequestLog("r", f"d{number}", "/v1/chat/completions", now[0])
            request_log.stream = True
            decision, booking = service.book(
                request_log, RoutingRequest(MODEL, TextPrompt(text, MODEL), 0, OUTPUT, None), "", FIRST_TRY
            )
            server = decision.target.key[0] - 1
            went[group][server] += 1
            first, step = servers.take(server, now[0], prefixes[group], len(text))
            heapq.heappush(todo, (first, number, "first", (server, booking, step, OUTPUT)))
        else:
            server, booking, step, left = about
            if what == "first":
                service.first_token(booking)
            else:
                service.emitted(booking, min(16, left))
                left -= min(16, left)
            if left:
                heapq.heappush(
                    todo, (now[0] + step * min(16, left), number, "tokens", (server, booking, step, left))
                )
            else:
                service.release(booking)
                servers.leave(server)
                heapq.heappush(todo, (now[0], number, "ask", None))
        number += 1
    total = [sum(group[server] for group in went) for server in range(2)]
    return Outcome(
        servers.cached / servers.tokens, sum(min(group) <= 1 for group in went), max(total) / sum(total)
    )


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure the cost of prefix guesses, and prefix routing over servers whose speed is learnt."""
    report = Report("Static backends", ("what", "cached", "ideal", "groups of 8 together", "busier server"))
    requests, seeds = REQUESTS, 9 if quick else 45
    outcomes: dict[str, Outcome] = {}
    for prefix_bytes in (200, 950):
        ideal = prefix_bytes * (requests - 1) / ((prefix_bytes + QUESTION_BYTES) * requests)
        for name, policy, speed in (
            ("learnt", "cost", None),
            ("assumed", "cost", EngineSpeed()),
            ("kv", "kv", None),
            ("round robin", "round_robin", None),
        ):
            runs = [routed(policy, speed, prefix_bytes, requests, seed) for seed in range(seeds)]  # type: ignore[arg-type]
            found = Outcome(*(median([run[at] for run in runs]) for at in range(3)))
            outcomes[name] = found
            report.add(
                f"{prefix_bytes} byte prefixes, {name}",
                f"{found.cached:.3f}",
                f"{ideal:.3f}",
                f"{found.together:g}",
                f"{found.most:.2f}",
            )
        gained = outcomes["learnt"].cached / outcomes["assumed"].cached
        report.targets.append(
            Target(f"cached, learnt / assumed, {prefix_bytes} bytes", gained, MIN_GAINED[prefix_bytes])
        )
        report.targets.append(
            Target(f"busier server, {prefix_bytes} bytes", outcomes["learnt"].most, MAX_SKEW, at_least=False)
        )
    for size in KILOBYTES:
        times = {block: guess_ms(block, 1024 * size, 20 if quick else 60) for block in BLOCKS}
        report.notes.append(
            f"a new prompt of {size} kB, decided and noted: "
            + ", ".join(f"{ms:.2f} ms in blocks of {at} tokens" for at, ms in times.items())
        )
        if size == 8:
            report.targets.append(
                Target("8 kB in blocks of 32 tokens", times[32], MAX_MS, at_least=False, unit=" ms")
            )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
