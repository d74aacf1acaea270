"""Publish the experts that each finished request activated, as signatures over the tracker's clusters
(`fleet.facts.activity.RequestsProfiled`), and the experts of some of their tokens (`TokensSampled`).

Every rank does this for its own requests, from all clients. Traces wait in a queue bounded in bytes. One
thread reads them off the event loop, and profiles are published in batches. Without a cluster model, and so
without a tracker, requests are dropped at once. Requests beyond the profiling capacity are dropped and
counted in `lost`. The counts of `ExpertsActivated` remain complete.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from engine_adapter.batching.profile_signatures import max_together, request_profiles
from engine_adapter.config import AgentConfig
from engine_adapter.engine import EndedRequest
from engine_adapter.reporting.cluster_subscriber import ClusterSubscriber
from engine_adapter.reporting.rank_context import RankContext
from fleet.dispatch import numbered
from fleet.experts import ModelShape
from fleet.facts.activity import RequestProfile, RequestsProfiled, TokensSampled
from fleet.placement import Placement
from fleet.routings import sampled_tokens
from fleet.signatures import ClusterModel

MESSAGE_BYTES = 400_000
"""Bytes of profiles in one message. Below the size that the bus splits (`bus.protocol.codec.LARGE`)."""
TURN_BYTES = 8 * 1024 * 1024
"""Bytes of traces per turn of the thread. A single larger trace is allowed."""
TURN_REQUESTS = 64
PROFILE_BLOCKS = 1024
"""KV blocks of a request whose signatures are reported, counted from the end of the reused prefix."""
_PROFILE_BYTES = 160
"""Size of a profile without its tables."""

_Part = TypeVar("_Part")

log = logging.getLogger(__name__)


class Allowance:
    """Token bucket: `rate` tokens a second, at most `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = float("-inf")

    def take(self, now: float) -> bool:
        """Take a token if one is available. True on success."""
        self._left = min(self._burst, self._left + self._rate * (now - self._at))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Waiting(NamedTuple):
    ended: EndedRequest
    placement: Placement


class RequestProfiler:
    """Profiles of one rank. `take` never blocks. `run` works until it is cancelled."""

    def __init__(
        self, context: RankContext, shape: ModelShape, config: AgentConfig, nodes: tuple[str, ...] = ()
    ) -> None:
        """nodes: machine of each rank. Empty: all ranks are on one."""
        self.lost = 0
        """Requests that were dropped because they finished faster than they could be profiled."""
        self._context = context
        self._config = config
        self._node = np.array(numbered(nodes or ("",) * context.about.ranks), np.intp)
        self._clusters = ClusterSubscriber(
            context.bus, context.subjects, context.about.model, shape, config.heartbeat_seconds
        )
        self._publisher = context.bus.publisher(context.subjects.requests_profiled(context.engine))
        self._tokens_publisher = context.bus.publisher(context.subjects.tokens_sampled(context.engine))
        self._waiting: deque[_Waiting] = deque()
        self.waiting_bytes = 0
        """Memory of the traces that wait to be profiled."""
        self._work = asyncio.Event()
        self._samples = Allowance(config.samples_per_second, config.samples_burst)
        self._batch: dict[tuple[int, int], list[RequestProfile]] = {}
        """Profiles by (placement epoch, version of the clusters)."""
        self._batch_bytes = 0
        self._tokens: list[bytes] = []
        """Sampled tokens of requests in `_batch`."""
        self._published_at = float("-inf")
        self._logged_lost = 0

    def take(self, ended: Sequence[EndedRequest], lost: int, placement: Placement | None) -> None:
        """Queue requests that finished under this placement. lost: further requests that the engine could not
        keep."""
        if self._clusters.model is None or placement is None:
            return
        self.lost += lost
        for one in ended:
            self._waiting.append(_Waiting(one, placement))
            self.waiting_bytes += one.nbytes
        while self.waiting_bytes > self._config.profile_queue_bytes and len(self._waiting) > 1:
            self._next()
            self.lost += 1
        if ended:
            self._work.set()
        if self.lost > 2 * self._logged_lost:
            self._logged_lost = self.lost
            log.warning(
                "requests of rank %d finish faster than they can be profiled; %d were dropped so far",
                self._context.rank,
                self.lost,
            )

    async def run(self) -> None:
        """Follow the clusters, and profile and publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                self._clusters.run(), name=f"follow the clusters of {self._context.about.model}"
            )
            tasks.create_task(
                self._profile_and_publish(), name=f"profile the requests of {self._context.name}"
            )

    async def _profile_and_publish(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    self._published_at + self._config.experts_seconds if self._batch else None
                ):
                    await self._work.wait()
            await self._profile(clock())
            if self._batch and (
                self._batch_bytes >= MESSAGE_BYTES
                or clock() - self._published_at >= self._config.experts_seconds
            ):
                await self._publish()
                self._published_at = clock()

    async def _profile(self, now: float) -> None:
        """Profile one turn of the queue."""
        model = self._clusters.model
        turn = self._turn(1 if model is None else min(TURN_REQUESTS, max_together(model)))
        if not self._waiting:
            self._work.clear()
        if model is None or not turn:
            return
        sampled = [self._samples.take(now) for _ in turn]
        profiles, tokens = await asyncio.to_thread(self._read, turn, sampled, model)
        self._batch.setdefault((turn[0].placement.epoch, model.version), []).extend(profiles)
        self._tokens += tokens
        self._batch_bytes += sum(map(_size, profiles)) + sum(map(len, tokens))

    def _turn(self, max_requests: int) -> list[_Waiting]:
        """Take the next requests to profile together: all of one placement, and few enough that a turn is
        short."""
        turn: list[_Waiting] = []
        limit = self.waiting_bytes - TURN_BYTES
        while self._waiting and (
            not turn
            or (
                self.waiting_bytes > limit
                and len(turn) < max_requests
                and self._waiting[0].placement is turn[0].placement
            )
        ):
            turn.append(self._next())
        return turn

    def _next(self) -> _Waiting:
        one = self._waiting.popleft()
        self.waiting_bytes -= one.ended.nbytes
        return one

    def _read(
        self, turn: Sequence[_Waiting], sampled: Sequence[bool], model: ClusterModel
    ) -> tuple[list[RequestProfile], list[bytes]]:
        """Profile one turn, and sample tokens of some requests. Runs in a thread, one turn at a time."""
        profiles = request_profiles(
            [one.ended for one in turn],
            model,
            turn[0].placement,
            self._context.rank,
            self._node,
            block_size=self._context.about.block_size,
            max_blocks=PROFILE_BLOCKS,
            sampled=sampled,
        )
        if self._context.about.rearranges:
            # Its replicas share by the rows of a step: experts do not tell where a request's tokens went.
            return [replace(one, local=None) for one in profiles], []
        chosen = (sampled_tokens(one.ended.routed) for one, kept in zip(turn, sampled, strict=True) if kept)
        return profiles, [one.astype("<u2").tobytes() for one in chosen if one is not None]

    async def _publish(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, {}, 0
        tokens, self._tokens = self._tokens, []
        for (epoch, clusters), profiles in batch.items():
            for part in _parts(profiles, _size):
                await self._publisher.publish(
                    RequestsProfiled(
                        **self._context.sender, epoch=epoch, clusters=clusters, requests=tuple(part)
                    )
                )
        for some in _parts(tokens, len):
            await self._tokens_publisher.publish(TokensSampled(**self._context.sender, requests=tuple(some)))


def _parts(several: Sequence[_Part], size_of: Callable[[_Part], int]) -> Iterator[list[_Part]]:
    """Split profiles or tokens, in order, into parts of about MESSAGE_BYTES. A larger one forms a part
    alone."""
    part: list[_Part] = []
    size = 0
    for one in several:
        if part and size + size_of(one) > MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += size_of(one)
    if part:
        yield part


def _size(profile: RequestProfile) -> int:
    """Approximate bytes on the bus."""
    sample = profile.sample
    tables = 0 if sample is None else len(sample.prompt.values) + len(sample.completion.values)
    return _PROFILE_BYTES + len(profile.blocks) + len(profile.block_signatures) + tables
