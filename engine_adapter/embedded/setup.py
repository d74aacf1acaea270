"""Assemble a rank's engine: checkpoint, initial placement, process group, forward pass."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.sampling import GREEDY, Draw, sample
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.arena import unshardable
from engine_adapter.embedded.checkpoint import Checkpoint, Qwen3MoeConfig
from engine_adapter.embedded.component_speeds import fastest_seconds
from engine_adapter.embedded.model_runner import (
    PAGE_TOKENS,
    Forward,
    ModelRunner,
    PreparedEpoch,
    SequenceWork,
)
from engine_adapter.embedded.step_notes import StepNote, TravellingWork, decoded, encoded
from engine_adapter.embedded.step_sync import RankGroup, StepHeader, StepSync
from engine_adapter.embedded.switching.attention_switch import AttentionSwitch
from engine_adapter.embedded.switching.peer_pools import PeerPools
from engine_adapter.engine import ExpertMemory, RankMemory
from engine_adapter.initial_placement import initial, resumed
from engine_adapter.resident_memory import resident_memory
from engine_adapter.transfer.port import TransferError
from fleet.dispatch import COVER
from fleet.experts import ModelShape
from fleet.facts.engines import FIXED_ATTENTION, UNSHARDABLE
from fleet.layout import tp_refusal
from fleet.placement import Placement
from fleet.timing import EngineSpeed

_MANY_SEQUENCES, _TIMES = 32, 25
"""Sequences of the larger of two measured steps, and repetitions of each."""

log = logging.getLogger(__name__)


class ForwardPass(Protocol):
    """Forward pass of a rank. See `model_runner.ModelRunner`."""

    def forward(
        self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None
    ) -> Forward: ...


class MovableExperts(Protocol):
    """Experts that can switch to another epoch. See `model_runner.ModelRunner`."""

    @property
    def arena(self) -> ExpertMemory: ...

    @property
    def cells(self) -> NDArray[np.int32]: ...

    def prepare(self, placement: Placement, cells: NDArray[np.int32]) -> PreparedEpoch: ...

    def adopt(self, prepared: PreparedEpoch) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Components of a rank, and properties of its model."""

    shape: ModelShape
    vocabulary: int
    """Rows of the logits."""
    max_context: int
    placement: Placement
    """Initial placement."""
    speed: EngineSpeed
    """Of steps under data-parallel attention."""
    tp_speed: EngineSpeed | None = None
    """Of steps under tensor-parallel attention. None: the ranks cannot compute it."""
    runner: ForwardPass
    experts: MovableExperts | None = None
    """None: the experts cannot be moved."""
    unshardable: str = UNSHARDABLE
    """`EngineJoined.unshardable`."""
    attention: AttentionSwitch | None = None
    """None: attention cannot be changed."""
    tp_refusal: str = FIXED_ATTENTION
    """`EngineJoined.tp_refusal`."""
    step_sync: StepSync
    kv_block_bytes: int = 0
    """Memory of one KV block over all layers, in bytes. 0: unknown."""
    memory: RankMemory | None = None
    """None: unknown."""
    weights_digest: str | None = None
    """`checkpoint.weights_digest`. None on all ranks but the first, which represents the engine."""
    close: Callable[[], None]
    """Release all resources. The other ranks then detect that this one is gone."""


SetupBuilder = Callable[[EmbeddedConfig, int, Path | None], RankSetup]


def build_setup(config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
    """Load a rank, join the others, and measure speeds together. Called by the step thread, which alone uses
    the result.

    run_directory: None for an engine of one rank, which then creates its own. CheckpointError, StepSyncError
    and ValueError state the reason of a failure. Nothing stays open then.
    """
    with contextlib.ExitStack() as opened:
        directory = (
            Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="roost-")))
            if run_directory is None
            else run_directory
        )
        before = resident_memory()
        group = _join(config, rank, directory, opened)
        step_sync = StepSync(directory, rank, group)
        opened.callback(step_sync.close)
        communicators = 0 if group is None else max(resident_memory().private - before.private, 0)
        with Checkpoint(Path(config.folder)) as checkpoint:
            about = checkpoint.config
            weights = checkpoint.digest(config.dtype) if rank == 0 else None
            start = _start(config, about, directory)
            runner = ModelRunner(
                checkpoint,
                start.placement,
                rank=rank,
                group=group,
                kv_pages=config.kv_blocks,
                dtype=config.dtype,
                max_tokens=config.max_batch_tokens,
                threads=config.threads_of_rank(os.cpu_count() or 1),
                cover=config.dispatch == COVER,
                ballast_bytes=config.ballast_bytes,
                spare_layers=config.spare_layers,
            )
        opened.callback(runner.close)
        attention, fixed = _attention(runner, start, group, step_sync, config)
        speed = _with_links(runner, config, runner.measure_speed())
        tp_speed = runner.measure_tp_speed()
        return RankSetup(
            shape=runner.shape,
            vocabulary=about.vocabulary,
            max_context=about.max_positions,
            placement=start.placement,
            speed=_with_loop(speed, step_sync, about.vocabulary, tensor_parallel=False),
            tp_speed=None
            if tp_speed is None
            else _with_loop(tp_speed, step_sync, about.vocabulary, tensor_parallel=True),
            kv_block_bytes=runner.kv_pool.page_bytes,
            memory=runner.memory._replace(communicators=communicators, runtime=before.private),
            weights_digest=weights,
            runner=runner,
            experts=runner,
            unshardable=start.unshardable,
            attention=attention,
            tp_refusal=fixed,
            step_sync=step_sync,
            close=opened.pop_all().close,
        )


class _Start(NamedTuple):
    """Placement that a rank starts with, and what its model cannot be served with."""

    placement: Placement
    unshardable: str
    """`EngineJoined.unshardable`."""
    tp_refusal: str
    """`EngineJoined.tp_refusal`."""


def _start(config: EmbeddedConfig, model: Qwen3MoeConfig, directory: Path) -> _Start:
    shape = model.shape(config.dtype)
    refusal = unshardable(shape, config.ranks, config.ballast_bytes)
    fixed = refusal or tp_refusal(shape, config.ranks) or ("it has one rank" if config.ranks == 1 else "")
    first = initial(
        None if config.placement is None else Path(config.placement),
        layers=model.layers,
        experts=model.experts,
        ranks=config.ranks,
        slots_per_rank=config.slots_per_rank,
        unshardable=refusal,
        tp_refusal=fixed,
    )
    return _Start(resumed(directory, first, refusal, fixed), refusal, fixed)


def _attention(
    runner: ModelRunner, start: _Start, group: RankGroup | None, step_sync: StepSync, config: EmbeddedConfig
) -> tuple[AttentionSwitch | None, str]:
    """Return the switch of attention, or why there is none."""
    if group is None or start.tp_refusal:
        return None, start.tp_refusal
    try:
        peers = PeerPools.meet(runner.kv_pool, group)
    except TransferError as error:
        log.warning("attention of this engine cannot change: %s", error)
        return None, f"its ranks cannot read each other's KV memory: {error}"
    return AttentionSwitch(runner, peers, step_sync, config, start.placement.attention), ""


def _with_loop(
    speed: EngineSpeed, step_sync: StepSync, vocabulary: int, *, tensor_parallel: bool
) -> EngineSpeed:
    """Add what the step loop does around the forward pass: exchange headers, and the plan of rank 0 under
    tensor-parallel attention, and sample. All ranks call it together."""
    logits = np.zeros((_MANY_SEQUENCES, vocabulary), np.float32)

    def around(sequences: int) -> None:
        plans = tensor_parallel and step_sync.rank == 0
        work = TravellingWork([1], PAGE_TOKENS, [0, 1], True)
        note = encoded(StepNote(plan=(work,) * sequences if plans else ()))
        headers = step_sync.exchange(StepHeader(step=0, note_bytes=len(note)))
        sizes = [header.note_bytes for header in headers]
        if any(sizes):
            for each in step_sync.share(note, sizes):
                decoded(each)
        sample(logits[:sequences], [Draw(GREEDY, 1)] * sequences)

    one = fastest_seconds(lambda: around(1), _TIMES)
    many = fastest_seconds(lambda: around(_MANY_SEQUENCES), _TIMES)
    each = max(0.0, many - one) / (_MANY_SEQUENCES - 1)
    return msgspec.structs.replace(
        speed, step=speed.step + max(0.0, one - each), decode_sequence=speed.decode_sequence + each
    )


def _with_links(runner: ModelRunner, config: EmbeddedConfig, measured: EngineSpeed) -> EngineSpeed:
    """Apply the configured link delay to the measured speeds. The added delay is known and need not be
    measured."""
    if config.link_seconds:
        runner.slow_links(config.link_seconds)
        # Of a token in a sharded layer, the price counts twice its bytes for every other rank.
        measured = msgspec.structs.replace(
            measured,
            dispatch=measured.dispatch + config.link_seconds,
            gather_byte=measured.gather_byte + config.link_seconds / (2 * runner.shape.token_bytes),
        )
        log.info(
            "sending a token to another rank and back takes %.3g s, including %.3g s of emulated network"
            " delay",
            measured.dispatch,
            config.link_seconds,
        )
    if config.dispatch_seconds is None:
        return measured
    log.info(
        "sending a token to another rank and back: %.3g s measured; the configured %.3g s are used",
        measured.dispatch,
        config.dispatch_seconds,
    )
    return msgspec.structs.replace(measured, dispatch=config.dispatch_seconds)


def _join(
    config: EmbeddedConfig, rank: int, directory: Path, opened: contextlib.ExitStack
) -> RankGroup | None:
    if config.ranks == 1:
        return None
    group = RankGroup(
        directory,
        rank,
        config.ranks,
        step_timeout_s=config.step_timeout_seconds,
        join_timeout_s=config.join_timeout_seconds,
    )
    opened.callback(group.close)
    return group
