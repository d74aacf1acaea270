"""The embedded engine behind the Engine port: one rank, its step thread, and the event-loop side of both."""

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from engine_adapter.batching.kv_cache import Block
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.expert_handover import RankExperts
from engine_adapter.embedded.setup import RankSetup, SetupBuilder, build_setup
from engine_adapter.embedded.step_loop import PeerLeft, StepLoop
from engine_adapter.embedded.step_results import StepReport
from engine_adapter.embedded.travelling import EmbeddedSequence, SequenceCodec
from engine_adapter.engine import EngineDescription, EngineFailed, RankFacts
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from engine_adapter.serving.fact_log import FACT_BLOCKS_PER_PAGE, FactLog
from engine_adapter.serving.generation import AnswerDelta, AnswerStream, GenerationOutcome
from engine_adapter.serving.sequences import built, sequence_parts
from fleet.blocks import BLOCK_SIZE
from fleet.facts.engines import Capabilities
from fleet.placement import Placement

_WATCH_SECONDS = 0.5
"""Interval of checks on the step in progress. Also added to the step timeout, so that a rank with more
information reports first."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Components that the step thread creates from a configuration."""

    setup: RankSetup
    tokenizer: CheckpointTokenizer
    description: EngineDescription
    facts: FactLog
    steps: StepLoop
    experts: RankExperts | None


@dataclass(frozen=True, slots=True)
class _Running:
    """A loaded rank and its step thread."""

    loaded: _Loaded
    thread: threading.Thread
    ended: "asyncio.Future[None]"
    """Completes with the thread, with the error that ended it."""


def _load(
    config: EmbeddedConfig,
    rank: int,
    run_directory: Path | None,
    build: SetupBuilder,
    report: Callable[[StepReport], None],
) -> _Loaded:
    tokenizer = CheckpointTokenizer(Path(config.folder))
    setup = build(config, rank, run_directory)
    pages = config.kv_blocks if setup.attention is None else setup.attention.pages("tp")
    facts = FactLog(setup.shape.layers, setup.shape.experts, FACT_BLOCKS_PER_PAGE * pages)
    room = min(setup.max_context, config.kv_blocks * BLOCK_SIZE)
    description = EngineDescription(
        kind="embedded",
        model=config.served_model,
        rank=rank,
        ranks=config.ranks,
        block_size=BLOCK_SIZE,
        kv_blocks=config.kv_blocks,
        kv_block_bytes=setup.kv_block_bytes,
        max_context=room if config.max_context is None else min(room, config.max_context),
        max_batch_tokens=config.max_batch_tokens,
        capabilities=Capabilities(isolates_tenants=True, token_frames=True),
        shape=setup.shape,
        unshardable=setup.unshardable,
        tp_refusal=setup.tp_refusal,
        dispatch=config.dispatch,
        speed=setup.calibration.speed,
        tp_speed=setup.calibration.tp_speed,
        layout_times=setup.calibration.layout_times,
        hardware=setup.hardware,
        tokenizer=tokenizer.archive,
        weights_digest=setup.weights_digest,
        memory=setup.memory,
    )
    steps = StepLoop(setup, config, facts, report, SequenceCodec(tokenizer, setup.shape), rank)
    return _Loaded(
        setup,
        tokenizer,
        description,
        facts,
        steps,
        None if setup.experts is None else RankExperts(setup.experts, steps, config.copy_ahead_seconds),
    )


class EmbeddedEngine:
    """One rank of the embedded engine. All methods are for the event loop that called `start`.

    `run_directory` is the meeting place of the ranks of one incarnation of the engine. With None, an engine
    of one rank creates its own.
    """

    def __init__(
        self,
        config: EmbeddedConfig,
        rank: int = 0,
        run_directory: Path | None = None,
        *,
        build: SetupBuilder = build_setup,
    ) -> None:
        if not 0 <= rank < config.ranks:
            raise ValueError(
                f"embedded engine: rank {rank} of {config.ranks}: ranks run from 0 to {config.ranks - 1}"
            )
        if config.ranks > 1 and run_directory is None:
            raise ValueError(
                f"embedded engine: {config.ranks} ranks need a run directory to meet in; name a fresh one,"
                " the same for all"
            )
        self.config = config
        self._rank = rank
        self._run_directory = run_directory
        self._build = build
        self._running: _Running | None = None
        self._failure: EngineFailed | None = None
        self._open: dict[AnswerStream, EmbeddedSequence] = {}
        """Requests that the step thread has not finished. Belongs to the event loop."""
        self._news = asyncio.Event()
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._seedless = 0

    @property
    def description(self) -> EngineDescription:
        return self._alive.description

    @property
    def placement(self) -> Placement:
        return self._alive.steps.placement

    @property
    def handover_seconds(self) -> float:
        """Duration of the last switch of attention, while another one is pending. Otherwise 0: experts are
        copied parallel to the steps, and the switch to their new epoch takes no measurable time."""
        return self._alive.steps.pause_seconds

    @property
    def experts(self) -> RankExperts | None:
        return self._alive.experts

    @property
    def tokenizer(self) -> CheckpointTokenizer:
        return self._alive.tokenizer

    @property
    def vocabulary(self) -> int:
        return self._alive.setup.vocabulary

    @property
    def failure(self) -> EngineFailed | None:
        return self._failure

    async def start(self) -> None:
        """Load, join the other ranks, measure speeds, and start stepping. EngineFailed states the reason when
        that is impossible."""
        loaded: concurrent.futures.Future[_Loaded] = concurrent.futures.Future()
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        name = f"steps of rank {self._rank}"
        thread = threading.Thread(
            target=self._thread, args=(asyncio.get_running_loop(), loaded, ended), name=name, daemon=True
        )
        thread.start()
        try:
            self._running = _Running(await asyncio.wrap_future(loaded), thread, asyncio.wrap_future(ended))
        except EngineFailed as failure:
            self._failure = failure
            raise
        self._running.ended.add_done_callback(self._on_end)

    async def submit(self, request: GenerationRequest) -> AnswerStream:
        self._refuse_if_failed()
        if len(self._open) >= self._alive.steps.max_open:
            raise Overloaded(self.config.max_waiting)
        request.check_bounds(max_context=self.description.max_context, vocabulary=self.vocabulary)
        answer = AnswerStream(self._cancel)
        sequence = await built(request.prompt, partial(self._new_sequence, request, answer))
        self._refuse_if_failed()
        if sequence.is_over:
            answer.put(AnswerDelta(outcome=sequence.outcome("stop", sequence.moments.submitted)))
            return answer
        self._open[answer] = sequence
        self._alive.steps.submit(sequence)
        return answer

    def stored_block(self, block_hash: int) -> Block | None:
        """Return the cached block of a sequence hash, or None."""
        return self._alive.steps.stored_block(block_hash)

    def fresh_seed(self) -> int:
        self._seedless += 1
        return xxhash.xxh3_64_intdigest(self._seedless.to_bytes(8, "little"), self._seed % (1 << 64))

    async def wait_facts(self) -> None:
        await self._news.wait()

    def take_facts(self) -> RankFacts:
        self._news.clear()
        return replace(self._alive.facts.take(), sent=self._alive.steps.take_sent())

    async def run(self) -> None:
        """Supervise until cancelled, then leave at the next step, or until EngineFailed. Either way, no
        request stays open."""
        running = self._started
        try:
            await self._watch(running)
        except asyncio.CancelledError:
            await self._stop(running)
            raise
        finally:
            running.loaded.steps.leave()

    async def _watch(self, running: _Running) -> None:
        limit = self.config.step_timeout_seconds + _WATCH_SECONDS
        while self._failure is None:
            await asyncio.wait({running.ended}, timeout=_WATCH_SECONDS)
            since = running.loaded.steps.stepping_since
            if since is not None and time.monotonic() - since > limit:
                self._fail(
                    EngineFailed(
                        f"rank {self._rank}: a step takes longer than {self.config.step_timeout_seconds:g} s"
                        " (step_timeout_seconds)"
                    )
                )
        self._refuse_if_failed()

    async def _stop(self, running: _Running) -> None:
        """Leave at the next step, within a time limit. A step thread that does not return is abandoned and
        dies with the process."""
        self._fail(EngineFailed(f"rank {self._rank} is stopping"))
        running.loaded.steps.leave()
        done, _ = await asyncio.wait({running.ended}, timeout=self.config.stop_timeout_seconds)
        if done:
            running.thread.join()  # The thread has already reported its result.
        else:
            log.warning(
                "rank %d: the step in progress did not end within %g s (stop_timeout_seconds)",
                self._rank,
                self.config.stop_timeout_seconds,
            )

    @property
    def _started(self) -> _Running:
        if self._running is None:
            raise RuntimeError("embedded engine: not started; await start() first")
        return self._running

    @property
    def _alive(self) -> _Loaded:
        return self._started.loaded

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure)) from self._failure

    def _new_sequence(self, request: GenerationRequest, answer: AnswerStream) -> EmbeddedSequence:
        tokenizer, shape = self._alive.tokenizer, self._alive.setup.shape
        state, text = sequence_parts(request, BLOCK_SIZE, tokenizer.detokenizer())
        trace = RoutedTrace(shape.layers, shape.top_k)
        return EmbeddedSequence(request, answer, state, text, trace, tokenizer.eos)

    def _cancel(self, answer: AnswerStream) -> GenerationOutcome | None:
        sequence = self._open.pop(answer, None)
        if sequence is None:
            return None
        self._alive.steps.cancel(sequence)
        return sequence.outcome("cancelled", time.time_ns())

    def _deliver(self, report: StepReport) -> None:
        for answer, news in report.news:
            sequence = self._open.get(answer)
            if sequence is None:
                continue  # Cancelled in the meantime.
            if isinstance(news, AnswerDelta):
                answer.put(news)
            else:
                answer.fail(news, sequence.outcome("failed", time.time_ns(), news))
            if answer.over:
                del self._open[answer]
        if report.facts:
            self._news.set()
        if self._alive.experts is not None:
            if report.caught_up:
                self._alive.experts.caught_up()
            if report.flipped is not None:
                self._alive.experts.flipped(report.flipped)

    def _on_end(self, ended: "asyncio.Future[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        self._fail(
            error
            if isinstance(error, EngineFailed)
            else EngineFailed(f"rank {self._rank}: {error or 'its step thread ended'}")
        )

    def _fail(self, failure: EngineFailed) -> None:
        """Fail the engine and all open requests. Only the first failure counts."""
        if self._failure is not None:
            return
        self._failure = failure
        for answer, sequence in self._open.items():
            answer.fail(EngineFailed(str(failure)), sequence.outcome("failed", time.time_ns(), failure))
        self._open.clear()
        if self._running is not None and self._running.loaded.experts is not None:
            self._running.loaded.experts.fail(failure)

    def _thread(
        self,
        loop: asyncio.AbstractEventLoop,
        loaded: "concurrent.futures.Future[_Loaded]",
        ended: "concurrent.futures.Future[None]",
    ) -> None:
        """Run the step thread, from loading to its end."""
        try:
            served = _load(
                self.config,
                self._rank,
                self._run_directory,
                self._build,
                lambda report: _notify(loop, self._deliver, report),
            )
        except Exception as error:
            log.exception("rank %d cannot start", self._rank)
            failure = EngineFailed(f"rank {self._rank} cannot start: {error}")
            failure.__cause__ = error
            _settle(loaded, failure)
            return
        try:
            if _settle(loaded, served):
                served.steps.run()
        except Exception as error:
            if served.steps.leaving:
                log.info("rank %d: the other ranks had already left (%s)", self._rank, error)
            else:
                if isinstance(error, PeerLeft):
                    log.warning("rank %d ends: %s", self._rank, error)
                else:
                    log.exception("rank %d failed", self._rank)
                ended.set_exception(error)
        finally:
            served.setup.close()
            if not ended.done():
                ended.set_result(None)


def _settle(future: "concurrent.futures.Future[Any]", result: object) -> bool:
    """Set the result or error of a future. False when its waiter was cancelled."""
    if not future.set_running_or_notify_cancel():
        return False
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return True


def _notify(
    loop: asyncio.AbstractEventLoop, listener: Callable[[StepReport], None], report: StepReport
) -> None:
    # The loop is closed: there is no listener, and the process is ending.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, report)
