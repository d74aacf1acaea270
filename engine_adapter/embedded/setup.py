"""Assemble a rank's engine: checkpoint, initial placement, process group, forward pass."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded import kernels
from engine_adapter.embedded.arena import unshardable
from engine_adapter.embedded.calibration.calibrate import EngineCalibration, calibrate, measure_prices
from engine_adapter.embedded.calibration.hardware import hardware_digest
from engine_adapter.embedded.checkpoint import Checkpoint, Qwen3MoeConfig
from engine_adapter.embedded.kv_exchange import KvExchange
from engine_adapter.embedded.model_runner import (
    Forward,
    ModelRunner,
    PreparedEpoch,
    SequenceWork,
)
from engine_adapter.embedded.step_sync import RankGroup, StepSync
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
    calibration: EngineCalibration
    hardware: str = ""
    """`EngineJoined.hardware`."""
    runner: ForwardPass
    experts: MovableExperts | None = None
    """None: the experts cannot be moved."""
    unshardable: str = UNSHARDABLE
    """`EngineJoined.unshardable`."""
    attention: AttentionSwitch | None = None
    """None: attention cannot be changed."""
    exchange: KvExchange | None = None
    """Of KV with other engines. None: there is none."""
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
        if kernels.missing:
            log.warning("torch computes the layers, in two to three times the time: %s", kernels.missing)
        attention, fixed = _attention(runner, start, group, step_sync, config)
        measured = calibrated(runner, step_sync, config, changes_attention=attention is not None)
        return RankSetup(
            shape=runner.shape,
            vocabulary=about.vocabulary,
            max_context=about.max_positions,
            placement=start.placement,
            calibration=measured,
            hardware=hardware_digest(config.ranks, config.dtype),
            kv_block_bytes=runner.kv_pool.page_bytes,
            memory=runner.memory._replace(communicators=communicators, runtime=before.private),
            weights_digest=weights,
            exchange=KvExchange(runner, _of_first(weights, group)),
            runner=runner,
            experts=runner,
            unshardable=start.unshardable,
            attention=attention,
            tp_refusal=fixed,
            step_sync=step_sync,
            close=opened.pop_all().close,
        )


def _of_first(digest: str | None, group: RankGroup | None) -> str:
    """Return the hexadecimal digest that rank 0 has, on every rank. All ranks call it together."""
    number = int(digest or "0", 16)
    words = [(number >> 32 * at) & 0xFFFFFFFF for at in range(4)]
    first = words if group is None else group.gather(words)[0]
    return f"{sum(int(word) << 32 * at for at, word in enumerate(first)):032x}"


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


def calibrated(
    runner: ModelRunner, step_sync: StepSync, config: EmbeddedConfig, *, changes_attention: bool
) -> EngineCalibration:
    """Measure the engine. From then on, its links are as slow as configured."""
    prices = measure_prices(runner)
    runner.slow_links(config.link_seconds, config.collective_seconds)
    if config.link_seconds or config.collective_seconds:
        log.info(
            "emulated network: %.3g s for each token sent to another rank and back, %.3g s for each exchange",
            config.link_seconds,
            config.collective_seconds,
        )
    return calibrate(runner, step_sync, config, prices, changes_attention=changes_attention)


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
