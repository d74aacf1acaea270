"""One rank of the simulated engine: its state, its requests and its reports. `engine` performs the steps."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.handed_kv import PromptKv, take_over
from engine_adapter.batching.kv_cache import Block, Change, KvCache
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.scheduler import BatchScheduler, SequenceState
from engine_adapter.engine import (
    DispatchCounts,
    EngineDescription,
    EngineFailed,
    RankFacts,
    RankLoad,
    RankMemory,
)
from engine_adapter.serving.fact_log import FACT_BLOCKS_PER_PAGE, FactLog
from engine_adapter.serving.generation import AnswerDelta, AnswerStream, GenerationOutcome
from engine_adapter.serving.sequences import built, sequence_parts
from engine_adapter.simulated.handover import AdoptionRun, SimulatedExperts
from engine_adapter.simulated.link_model import SimulatedLinks
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.dispatch_model import DispatchModel
from engine_adapter.simulated.model.faults import Faults
from engine_adapter.simulated.model.presets import cache_token_bytes
from engine_adapter.simulated.model.routing_model import RoutingModel
from engine_adapter.simulated.model.step_time import StepPlan, plan, tokens_of_row
from engine_adapter.simulated.model.step_totals import StepTotals
from engine_adapter.simulated.model.text import VOCABULARY, Script, WordTokenizer
from engine_adapter.simulated.sequences import RowTrace, SimulatedSequence
from fleet.blocks import BLOCK_SIZE
from fleet.facts.engines import Capabilities
from fleet.layout_times import LayoutTimes
from fleet.placement import Placement

_MAX_SENT = 16
"""Limit of pending dispatch statistics. Beyond it, the oldest are dropped."""
_TP_REFUSAL = "a simulated engine computes each request on one rank"
_ENDED_BYTES = 4 * 1024 * 1024
"""Memory for a rank's finished requests that wait to be taken."""


class SimulatedGroup(Protocol):
    """The engine, as one of its ranks sees it. See `engine.SimulatedEngine`."""

    config: SimulatedConfig
    routing: RoutingModel
    tokenizer: WordTokenizer
    placement: Placement
    faults: Faults
    adoptions: AdoptionRun
    links: SimulatedLinks
    routes: DispatchModel
    totals: StepTotals
    layout_times: tuple[LayoutTimes, ...]
    failure: EngineFailed | None

    @property
    def now(self) -> float: ...

    @property
    def step_seconds(self) -> float | None: ...

    def chance(self, share: float) -> bool: ...

    def wake(self) -> None: ...

    def refuse_if_failed(self) -> None: ...

    async def serve(self, rank: int) -> None: ...


class SimulatedRank:
    """One rank behind the Engine port (`engine_adapter.engine`) and behind an HTTP server
    (`engine_adapter.serving.http.ServedModelInfo`)."""

    def __init__(self, engine: SimulatedGroup, number: int) -> None:
        config = engine.config
        self.description = _describe(config, number, engine.tokenizer.archive, engine.layout_times)
        self.vocabulary = VOCABULARY
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._config = config
        self._number = number
        self._cache = KvCache(config.kv_blocks, BLOCK_SIZE)
        self.scheduler = BatchScheduler(
            self._cache,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
        )
        shape = config.model_shape
        self._facts = FactLog(
            shape.layers, shape.experts, FACT_BLOCKS_PER_PAGE * config.kv_blocks, _ENDED_BYTES
        )
        self._sequences: dict[SequenceState, SimulatedSequence] = {}
        self._open: dict[AnswerStream, SimulatedSequence] = {}
        self._news = asyncio.Event()
        self._activity = np.zeros(engine.routing.rows, np.int64)
        """Tokens by row since the activations were last counted."""
        self.counted = engine.totals
        """Totals of the engine's steps when the activations were last counted."""
        self._sent: deque[DispatchCounts] = deque(maxlen=_MAX_SENT)
        self._counted_at = float("-inf")
        self._budget = float(config.profiled_tokens_per_second)
        self._budget_at = float("-inf")
        self._experts = SimulatedExperts(engine, number, parts=config.parts, spare_layers=config.spare_layers)
        self.transfer = engine.links.join(number, self._experts.memory)
        """Transfer backend for reading other ranks' experts."""

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    @property
    def experts(self) -> SimulatedExperts:
        return self._experts

    @property
    def handover_seconds(self) -> float:
        return self._engine.faults.handover_left(self._engine.now)

    @property
    def failure(self) -> EngineFailed | None:
        return self._engine.failure

    async def start(self) -> None:
        """Do nothing: there is nothing to load."""

    async def run(self) -> None:
        """Serve until cancelled or until EngineFailed. Rank 0 steps for all. Either way, no request stays
        open."""
        await self._engine.serve(self._number)

    async def wait_facts(self) -> None:
        await self._news.wait()

    def take_facts(self) -> RankFacts:
        self.report_changes()
        self._news.clear()
        now = self._engine.now
        if not self._sequences or now - self._counted_at >= self._config.activity_seconds:
            self.count()
        sent = tuple(self._sent)
        self._sent.clear()
        return replace(self._facts.take(), sent=sent)

    async def submit(self, request: GenerationRequest) -> AnswerStream:
        self._engine.refuse_if_failed()
        request.check_bounds(max_context=self.description.max_context, vocabulary=VOCABULARY)
        answer = AnswerStream(self._cancel)
        sequence = await built(request.prompt, partial(self._new_sequence, request, answer))
        self._engine.refuse_if_failed()
        if sequence.is_over:
            answer.put(AnswerDelta(outcome=sequence.outcome("stop", sequence.moments.submitted)))
            return answer
        if request.kv is not None and request.kv.layout == self._kv_layout:
            await self._fetch(request.kv, sequence.state.blocks[: (len(request.prompt) - 1) // BLOCK_SIZE])
            self._engine.refuse_if_failed()
        self.scheduler.submit(sequence.state)
        self._sequences[sequence.state] = self._open[answer] = sequence
        self.report_changes()
        self._engine.wake()
        return answer

    async def _fetch(self, source: PromptKv, blocks: Sequence[Block]) -> None:
        """Take over the KV of a prompt after the time that its bytes take between two machines."""
        config = self._config
        lacking = sum(not self._cache.has(one.block_hash) for one in blocks[: source.blocks])
        size = lacking * self.description.kv_block_bytes
        await asyncio.sleep(config.time_scale * size / config.node_bytes_per_second)
        take_over(self._cache, blocks[: source.blocks], lambda block, page: True)

    @property
    def _kv_layout(self) -> str:
        return f"simulated {self.description.model}"

    def stored_block(self, block_hash: int) -> Block | None:
        """Return the cached block of a sequence hash, or None."""
        return self._cache.block(block_hash)

    def fresh_seed(self) -> int:
        """Return 0, so that requests without a seed get the same answer everywhere."""
        return 0

    # calls from the engine

    def plan(self) -> StepPlan:
        """Plan the next step. Its requests count as admitted from now on."""
        slices = self.scheduler.plan()
        now = time.time_ns() if slices else 0
        for one in slices:
            if cached := self._sequences[one.sequence].admit(now):
                self._facts.add_cached(cached)
        return plan(slices, self._engine.routing)

    def book(self, done: StepPlan, by_row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Record a completed step. by_row: int [rows] tokens of the step. Requests cancelled meanwhile were
        never computed. Return by_row without them."""
        parts = [one for one in done.parts if one.part.sequence in self._sequences]
        if len(parts) < len(done.parts):
            by_row = tokens_of_row(parts, len(by_row))
        self._activity += by_row
        now = time.time_ns()
        for one in parts:
            sequence = self._sequences[one.part.sequence]
            self.scheduler.computed(one.part)
            sequence.trace.note(one.part.start, one.rows)
            if one.part.last:
                self._advance(sequence, now)
        if done.parts:
            self.report_changes()
        return by_row

    def report_changes(self) -> None:
        """Record changes for the agent to take."""
        engine = self._engine
        changes = self._kept(self._cache.take_changes())
        self._facts.add_kv(changes, self._cache.restated)
        factor = engine.faults.factor("lie_load", self._number, engine.now)
        load = self.scheduler.load(engine.step_seconds)
        if factor != 1.0:
            load = _multiplied(load, factor)
        if self._facts.set_load(load) or changes:
            self._news.set()

    def count(self) -> None:
        """Record activations and dispatch since the last call, under the placement that is still served."""
        self._counted_at = self._engine.now
        if self._engine.totals is self.counted:
            return
        tokens, new = int(self._activity.sum()), self._engine.totals.since(self.counted)
        self.counted = self._engine.totals
        self._sent.append(self._sent_in(new, tokens))
        if tokens:
            self._facts.add_activations(self._engine.routing.counts(self._activity), tokens)
            self._activity[:] = 0

    def _sent_in(self, new: StepTotals, tokens: int) -> DispatchCounts:
        remote, local = self._engine.routes.sent(self._number, self._activity)
        return DispatchCounts(
            epoch=self.placement.epoch,
            steps=new.steps,
            step_seconds=new.seconds,
            tokens=tokens,
            pairs=tokens * self._config.model_shape.top_k,
            remote_ranks=remote,
            local=local,
            served=new.served[:, self._number],
            balance=new.balance,
        )

    def fail(self, failure: EngineFailed) -> None:
        """End every open request with this failure."""
        open_sequences, now = list(self._open.items()), time.time_ns()
        for answer, sequence in open_sequences:
            answer.fail(type(failure)(str(failure)), sequence.outcome("failed", now, failure))
            self._end(sequence)
        if open_sequences:
            self.report_changes()

    def check_idle(self) -> None:
        """RuntimeError when pages are held although nothing runs."""
        self.scheduler.check_idle()

    def _new_sequence(self, request: GenerationRequest, answer: AnswerStream) -> SimulatedSequence:
        tokenizer = self.tokenizer
        state, text = sequence_parts(request, BLOCK_SIZE, tokenizer.detokenizer())
        own = request.prompt[: len(request.prompt) - request.emitted]
        seed = request.sampling.seed if request.sampling.temperature > 0 else 0
        script = Script(tokenizer, own, seed, 0 if request.ignore_eos else self._config.output_tokens)
        trace = RowTrace(self._engine.routing)
        return SimulatedSequence(request, answer, state, text, trace, (tokenizer.end,), script=script)

    def _advance(self, sequence: SimulatedSequence, now: int) -> None:
        token = sequence.script.token(len(sequence.state.tokens))
        self.scheduler.append(sequence.state, token)
        delta = sequence.next_delta(token, now)
        if delta.outcome is not None and sequence.request.hands_over:
            sequence.answer.kv = PromptKv(
                layout=self._kv_layout,
                blocks=sequence.prompt_tokens // BLOCK_SIZE,
                page_bytes=self.description.kv_block_bytes,
            )
        sequence.answer.put(delta)
        if delta.outcome is not None:
            self._end(sequence)

    def _cancel(self, answer: AnswerStream) -> GenerationOutcome | None:
        sequence = self._open.get(answer)
        if sequence is None:
            return None
        self._end(sequence)
        self.report_changes()
        return sequence.outcome("cancelled", time.time_ns())

    def _end(self, sequence: SimulatedSequence) -> None:
        """Free everything that a request holds, and report what it computed."""
        del self._open[sequence.answer], self._sequences[sequence.state]
        self.scheduler.remove(sequence.state)
        ended = sequence.ended()
        if ended is not None and self._may_report(sequence.trace.positions):
            self._facts.add_ended(ended)
            self._news.set()

    def _may_report(self, positions: int) -> bool:
        rate, now = self._config.profiled_tokens_per_second, self._engine.now
        self._budget = min(rate, self._budget + rate * (now - self._budget_at))
        self._budget_at = now
        if self._budget <= 0:
            return False
        self._budget -= positions
        return True

    def _kept(self, changes: list[Change]) -> list[Change]:
        """Drop the changes that the lose_kv_events fault hides."""
        share = self._engine.faults.share("lose_kv_events", self._number, self._engine.now)
        return [one for one in changes if not self._engine.chance(share)] if share else changes


def _multiplied(load: RankLoad, factor: float) -> RankLoad:
    """Return a false load: all but the blocks in use, times a factor."""
    return replace(
        load,
        running=round(factor * load.running),
        waiting=round(factor * load.waiting),
        prefill_tokens=round(factor * load.prefill_tokens),
        decode_blocks=round(factor * load.decode_blocks),
    )


def _describe(
    config: SimulatedConfig, rank: int, archive: bytes, layout_times: tuple[LayoutTimes, ...]
) -> EngineDescription:
    return EngineDescription(
        kind="simulated",
        model=config.served_model,
        rank=rank,
        ranks=config.ranks,
        block_size=BLOCK_SIZE,
        kv_blocks=config.kv_blocks,
        kv_block_bytes=BLOCK_SIZE * cache_token_bytes(config.shape),
        max_context=config.context,
        max_batch_tokens=config.max_batch_tokens,
        capabilities=Capabilities(isolates_tenants=True, token_frames=True),
        shape=config.model_shape,
        unshardable=config.unshardable,
        tp_refusal=_TP_REFUSAL,
        dispatch=config.dispatch_rule,
        speed=config.real_speed,
        layout_times=layout_times,
        hardware=f"simulated {config.shape}" if layout_times else "",
        tokenizer=archive,
        weights_digest=config.weights,
        memory=RankMemory(
            note="a simulated engine computes nothing: it holds no weights and no KV, its cells are small"
            " stand-ins, and all its ranks are one process",
            ranks_in_process=config.ranks,
        ),
    )
