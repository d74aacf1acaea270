"""Reports of the plugin in vLLM's workers, as facts of the targets. Pure.

Expert ranks count what they compute; a target's requests are computed by one expert rank or, under tensor
parallelism, by several. A report names the map under which it was counted; reports under a map of unknown
epoch are dropped."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.engine import Activations, DispatchCounts, EndedRequest
from engine_adapter.vllm.server import NUDGE
from engine_adapter.vllm.wire import MapMoved, RoutedRequest, WorkerDemand, WorkerHello
from fleet.experts import BYTES_PER_VALUE, ModelShape
from fleet.facts.activity import RearrangementTime

GATHERS = ("allgather_reducescatter", "naive")
"""vLLM's all2all backends that send every token to every rank."""
_MAX_POSITION = 1 << 24
_CHOICE = re.compile(r"^\d+_")
_PROMPT = re.compile(r"-\d+$")


class EngineShape(NamedTuple):
    """Properties of an engine whose workers have introduced themselves."""

    shape: ModelShape
    gathers_all: bool


def engine_shape(hello: WorkerHello) -> EngineShape:
    """Return what a worker's introduction says of the engine.

    Only the bytes of an expert are known, not its dimensions: the shape states a hidden size of 1, and the
    intermediate size that gives these bytes. ValueError for an impossible shape.
    """
    dtype = hello.dtype if hello.dtype in BYTES_PER_VALUE and not hello.quantisation else "float8_e4m3fn"
    values = -(-hello.expert_bytes // (3 * BYTES_PER_VALUE[dtype]))
    return EngineShape(
        ModelShape(
            layers=hello.layers,
            experts=hello.experts,
            top_k=hello.top_k,
            hidden=1,
            expert_intermediate=max(values, 1),
            dtype=dtype,
        ),
        hello.targets == 1 or hello.all2all in GATHERS,
    )


def decision_of(request: str) -> str:
    """Return the decision id of vLLM's external request id: the `X-Request-Id` of the attempt, to which
    vLLM's routes add "chatcmpl-", or "cmpl-" and the number of the prompt, and to each of several choices its
    number."""
    name = _CHOICE.sub("", request)
    if name.startswith("chatcmpl-"):
        return name.removeprefix("chatcmpl-")
    return _PROMPT.sub("", name.removeprefix("cmpl-")) if name.startswith("cmpl-") else name


def ended_request(message: RoutedRequest, hello: WorkerHello) -> EndedRequest | None:
    """Return an ended request; None for one of the agent's own. ValueError when the message contradicts
    itself or the introduction of its worker.

    Its blocks are unknown: the workers do not report its tokens."""
    if NUDGE in message.request:
        return None
    if message.top_k != hello.top_k or not 0 <= message.first <= _MAX_POSITION:
        raise ValueError(f"top_k is {message.top_k}, the first routed position {message.first}")
    shape = (message.positions, hello.layers, hello.top_k)
    chosen = _table(message.experts, "<i2", shape, "experts")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < hello.experts:
        raise ValueError(f"experts run from {chosen.min()} to {chosen.max()}, of {hello.experts}")
    trace = RoutedTrace(hello.layers, hello.top_k)
    trace.note(message.first, chosen)
    return EndedRequest(decision_of(message.request), message.prompt_tokens, trace, ())


def _table(content: bytes, kind: str, shape: Sequence[int], name: str) -> NDArray[Any]:
    expected = int(np.prod(shape)) * np.dtype(kind).itemsize
    if min(shape) < 0 or len(content) != expected:
        raise ValueError(f"{name}: {len(content)} bytes, expected {expected} for {list(shape)}")
    return np.frombuffer(content, kind).reshape(shape)


class DemandSplit:
    """Counts of all expert ranks, as the facts of each target.

    `served` of a target is what the ranks that compute its requests serve for all targets. Ranks report at
    different times, so it is carried until the target's own next report."""

    def __init__(self, hello: WorkerHello) -> None:
        self._hello = hello
        shape = engine_shape(hello)
        self._gathers = shape.gathers_all
        self._target_of_rank = np.arange(hello.ranks) * hello.targets // hello.ranks
        self._served = np.zeros((hello.targets, hello.layers), np.float64)

    def add(
        self, rank: int, report: WorkerDemand, epoch: int
    ) -> tuple[Activations | None, DispatchCounts | None]:
        """Return the facts of the target of an expert rank. None: a lower rank reports them. ValueError for
        arrays of other shapes, and for negative counts."""
        about = self._hello
        if min(report.steps, report.tokens, report.seconds) < 0:
            raise ValueError(f"negative counts: {report.steps} steps, {report.tokens} tokens")
        if not report.demand:
            return None, None
        demand = _table(report.demand, "<i8", (about.layers, about.experts), "demand")
        if demand.min(initial=0) < 0:
            raise ValueError("demand has negative counts")
        activations = Activations(demand.astype(np.int64), report.tokens, 0)
        if not report.slots or not report.steps:
            return activations, None
        return activations, self._dispatch(rank, report, epoch)

    def _dispatch(self, rank: int, report: WorkerDemand, epoch: int) -> DispatchCounts:
        about = self._hello
        slots = _table(report.slots, "<i8", (about.layers, about.ranks, about.slots), "slots")
        by_rank = slots.sum(axis=2).astype(np.float64)
        for served_by in range(about.ranks):
            self._served[self._target_of_rank[served_by]] += by_rank[:, served_by]
        target = int(self._target_of_rank[rank])
        own = by_rank[:, self._target_of_rank == target].sum(axis=1)
        served, self._served[target] = self._served[target].copy(), 0.0
        return DispatchCounts(
            epoch=epoch,
            steps=report.steps,
            step_seconds=report.seconds,
            tokens=report.tokens,
            pairs=report.tokens * about.top_k,
            remote_ranks=self._remote(by_rank, target, report.tokens),
            local=np.minimum(own, report.tokens * about.top_k),
            served=served,
            balance=self._balance(report, by_rank),
        )

    def _remote(self, by_rank: NDArray[np.float64], target: int, tokens: int) -> NDArray[np.float64]:
        """Return the distinct other ranks that tokens were sent to, summed over the tokens: float64 [layers].

        Other backends than those that send every token everywhere count no tokens: the number is that of
        independent choices with the measured shares."""
        others = self._target_of_rank != target
        if self._gathers:
            return np.full(len(by_rank), float(tokens * others.sum()))
        share = by_rank / np.maximum(by_rank.sum(axis=1, keepdims=True), 1.0)
        reached = 1.0 - (1.0 - share) ** self._hello.top_k
        return np.asarray(tokens * reached[:, others].sum(axis=1), np.float64)

    def _balance(self, report: WorkerDemand, by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return mean / highest load, summed over the steps: float64 [layers]. From the sums of the interval
        where the plugin does not know it per step."""
        if report.balance:
            return _table(report.balance, "<f8", (self._hello.layers,), "balance").astype(np.float64)
        highest = by_rank.max(axis=1)
        even = np.where(highest > 0, by_rank.mean(axis=1) / np.maximum(highest, 1.0), 1.0)
        return np.asarray(report.steps * even, np.float64)


class MoveTimes:
    """Durations of vLLM's rearrangements, with what they moved."""

    def __init__(self, hello: WorkerHello, table: NDArray[np.int16]) -> None:
        """table: map in force, int16 [layers, slots]."""
        self._hello = hello
        self._table = table
        self._seconds: dict[int, float] = {}
        self._handover = 0

    def add(self, rank: int, moved: MapMoved) -> RearrangementTime | None:
        """Return the measured rearrangement once all ranks have reported theirs; None before."""
        if moved.handover != self._handover:
            self._handover, self._seconds = moved.handover, {}
        self._seconds[rank] = moved.seconds
        if len(self._seconds) < self._hello.ranks:
            return None
        table = np.frombuffer(moved.map, "<i2").reshape(self._table.shape)
        received = self._received(table)
        self._table, seconds = table, max(self._seconds.values())
        self._seconds = {}
        return RearrangementTime(
            layers=int((received > 0).sum()),
            bytes=int(received.sum()) * self._hello.expert_bytes,
            seconds=max(seconds, 0.0),
        )

    def _received(self, table: NDArray[np.int16]) -> NDArray[np.int64]:
        """Return the experts that the busiest rank of each layer gets from others: int64 [layers]."""
        old, new = (self._held(one) for one in (self._table, table))
        return np.asarray((new & ~old).sum(axis=2).max(axis=1), np.int64)

    def _held(self, table: NDArray[np.int16]) -> NDArray[np.bool_]:
        """Return the experts of each rank: bool [layers, ranks, experts]."""
        about = self._hello
        held = np.zeros((about.layers, about.ranks, about.experts), np.bool_)
        layer, slot = np.indices(table.shape)
        held[layer, slot // about.slots, table] = True
        return held
