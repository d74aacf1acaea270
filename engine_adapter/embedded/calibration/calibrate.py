"""Calibration of an engine at its start: speeds for the router, and step times in each layout."""

import logging
import time
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.calibration.cells import Cell, Room, affordable, batches, prompts
from engine_adapter.embedded.calibration.component_speeds import (
    dispatch_seconds,
    gather_byte_seconds,
    pair_seconds,
    read_seconds,
)
from engine_adapter.embedded.calibration.layout_times import times_of_layout
from engine_adapter.embedded.calibration.measurement import MeasuredSteps, StepMeasurement
from engine_adapter.embedded.calibration.rehearsal import StepRehearsal, event_loop, scratch
from engine_adapter.embedded.calibration.speed_fit import fitted
from engine_adapter.embedded.model_runner import ModelRunner
from engine_adapter.embedded.moe import SparseBlock
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from engine_adapter.embedded.step_sync import StepSync
from fleet.layout_times import LayoutName, LayoutTimes
from fleet.placement import Placement, linear, with_attention, with_rows
from fleet.timing import EngineSpeed

_LayoutKey = LayoutName | Literal["served"]
"""served: some layers are sharded, with data-parallel attention."""
_NOTHING = EngineSpeed(dispatch=0.0, expert_read=0.0, expert_pair=0.0, gather_byte=0.0)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalibration:
    """Figures that an engine measured at its start."""

    speed: EngineSpeed
    """Of steps under data-parallel attention, in the form of the layers that is served at the start."""
    tp_speed: EngineSpeed | None = None
    """Of steps under tensor-parallel attention. None: the ranks cannot compute it."""
    layout_times: tuple[LayoutTimes, ...] = ()
    """Of each layout that the engine can change to. Empty: it cannot change its layout."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of parts of a step, measured without emulated delays."""

    dp: EngineSpeed
    """dispatch to gather_byte, under data-parallel attention."""
    tp: EngineSpeed
    """The same under tensor-parallel attention: only reads of parts of experts. What ranks send one another
    is part of the steps."""


def measure_prices(runner: ModelRunner) -> Prices:
    """Measure the costs of parts of a step. All ranks call it together, between two steps."""
    layouts = _placements(runner)
    dp = _prices(runner, _blocks(runner, layouts["ep"]))
    return Prices(dp, _tp_prices(runner, _blocks(runner, layouts["tp"])) if "tp" in layouts else _NOTHING)


def calibrate(
    runner: ModelRunner,
    step_sync: StepSync,
    config: EmbeddedConfig,
    prices: Prices,
    *,
    changes_attention: bool,
) -> EngineCalibration:
    """Measure steps in every layout that the ranks can compute. All ranks call it together, before they
    serve: KV is lost.

    changes_attention: the engine can change its attention."""
    began = time.perf_counter()
    placements = _placements(runner)
    served: _LayoutKey = next(
        key
        for key, one in placements.items()
        if one.attention == "dp" and one.sharded == runner.placement.sharded
    )
    layouts = {key: runner.prepare(one, runner.cells) for key, one in placements.items()}
    with scratch(runner), event_loop() as deliver:
        rehearsal = StepRehearsal(runner, step_sync, config, deliver)
        measurement = StepMeasurement(runner, rehearsal, layouts)
        room = _room(runner, config)
        decode, prompt = batches(room).cells[-1], prompts(room)[0]
        longest = measurement.seconds_of("ep", decode), measurement.seconds_of("ep", prompt)
        room = affordable(room, *longest, len(layouts))
        every, full = batches(room), prompts(room)
        cells: dict[_LayoutKey, list[Cell]] = {
            key: [*every.cells, *(full if key in (served, "tp") else full[:1])] for key in layouts
        }
        found = measurement.of(cells, config.calibration_seconds)
    log.info("steps in %s measured in %.1f s", ", ".join(placements), time.perf_counter() - began)
    tokens = full[0].tokens * room.ranks
    times = {
        key: times_of_layout(key, every, steps, tokens)
        for key, steps in found.items()
        if key != "served" and (key != "tp" or changes_attention)
    }
    speed = _fitted(_with_links(runner, config, prices.dp), found[served])
    return EngineCalibration(
        speed=_with_configured_dispatch(config, speed),
        tp_speed=_fitted(prices.tp, found["tp"]) if "tp" in found else None,
        layout_times=tuple(times.values()) if len(times) > 1 else (),
    )


def _fitted(prices: EngineSpeed, steps: list[MeasuredSteps]) -> EngineSpeed:
    return fitted(prices, [one.load for one in steps], [one.usual for one in steps])


def _placements(runner: ModelRunner) -> dict[_LayoutKey, Placement]:
    """Return the layouts that the ranks can compute, with the served experts where a layer is whole."""
    placement = with_attention(runner.placement, "dp", epoch=runner.placement.epoch)
    in_order = linear(
        layers=placement.layers,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
    )
    whole = {layer: in_order.expert_of_slot[layer] for layer in placement.sharded}
    found: dict[_LayoutKey, Placement] = {"ep": with_rows(placement, whole, epoch=placement.epoch)}
    if placement.ranks > 1 and runner.arena.parts == placement.ranks:
        sharded = with_rows(placement, dict.fromkeys(range(placement.layers)), epoch=placement.epoch)
        found["experts-tp"] = sharded
        if runner.computes_tp:
            found["tp"] = with_attention(sharded, "tp", epoch=placement.epoch)
    if 0 < len(placement.sharded) < placement.layers:
        found["served"] = placement
    return found


def _room(runner: ModelRunner, config: EmbeddedConfig) -> Room:
    ranks = runner.placement.ranks
    # A page of tensor-parallel attention is a unit on every rank, so there are `groups` times as many.
    shares = min(ranks, runner.kv_pool.groups) if runner.computes_tp else ranks
    return Room(
        ranks=ranks,
        sequences=config.max_running,
        tokens=config.max_batch_tokens,
        pages=config.kv_blocks * shares,
        positions=min(runner.config.max_positions, config.kv_blocks * PAGE_TOKENS),
    )


def _blocks(runner: ModelRunner, placement: Placement) -> list[SparseBlock]:
    """Return the blocks of all layers. Of layers in another form than the served one, the weights are
    meaningless."""
    return [layer.block for layer in runner.prepare(placement, runner.cells).layers]


@torch.inference_mode()
def _prices(runner: ModelRunner, blocks: list[SparseBlock]) -> EngineSpeed:
    """Measure what experts cost beside whole steps, under data-parallel attention. blocks: of whole
    layers."""
    placement, shape = runner.placement, runner.shape
    return EngineSpeed(
        dispatch=dispatch_seconds(
            runner.dispatch, placement, runner.served.sending, shape, runner.rank, runner.max_tokens
        ),
        expert_read=read_seconds(blocks, shape, placement.slots_per_rank),
        expert_pair=pair_seconds(blocks[0], shape, placement.slots_per_rank),
        gather_byte=gather_byte_seconds(runner.dispatch, shape, placement.ranks, runner.max_tokens),
    )


@torch.inference_mode()
def _tp_prices(runner: ModelRunner, blocks: list[SparseBlock]) -> EngineSpeed:
    """Measure the reads of parts of experts. What ranks send one another is part of the steps. blocks: of
    sharded layers."""
    read = read_seconds(blocks, runner.shape, runner.placement.experts)
    return msgspec.structs.replace(_NOTHING, expert_read=read)


def _with_links(runner: ModelRunner, config: EmbeddedConfig, measured: EngineSpeed) -> EngineSpeed:
    """Add the configured delay of a token to prices that were measured without it. It is known and need not
    be measured."""
    # Of a token in a sharded layer, the price counts twice its bytes for every other rank.
    return msgspec.structs.replace(
        measured,
        dispatch=measured.dispatch + config.link_seconds,
        gather_byte=measured.gather_byte + config.link_seconds / (2 * runner.shape.token_bytes),
    )


def _with_configured_dispatch(config: EmbeddedConfig, measured: EngineSpeed) -> EngineSpeed:
    """Replace the cost of sending a token to another rank by the configured one, if there is one."""
    if config.dispatch_seconds is None:
        return measured
    log.info(
        "sending a token to another rank and back: %.3g s measured; the configured %.3g s are used",
        measured.dispatch,
        config.dispatch_seconds,
    )
    return msgspec.structs.replace(measured, dispatch=config.dispatch_seconds)
