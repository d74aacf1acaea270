"""Fleet events as single lines of text. Pure."""

from collections.abc import Mapping

from bus import Message
from deploy.terminal.output import printable
from fleet.facts.demand import PopularityShifted
from fleet.facts.engines import ConfigChanged, EngineJoined, EngineLeft, RankDrained
from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.layout import ATTENTION_NAMES, layer_ranges
from fleet.placement import PlacementRecord
from fleet.text import byte_size, counted, listed

LISTED_LAYERS = 6
"""most moved layers that are named"""


def event_line(message: Message, homes: Mapping[int, int] | None = None) -> str | None:
    """Return one line; None if the message is no news. homes: by worker_id, the last known version of the
    homes, since they are published repeatedly."""
    line = _migration_line(message) or _planner_line(message, homes or {}) or _operator_line(message)
    return None if line is None else printable(line)


def _migration_line(message: Message) -> str | None:
    match message:
        case MigrationPlanned():
            predicted = (
                ""
                if message.before is None or message.after is None
                else f": {_change(message.before, message.after)}"
            )
            copied = (
                f"{counted(message.copies, 'copy', 'copies')}, {byte_size(message.bytes)}"
                if message.copies
                else "no bytes"
            )
            turns = "".join(
                f", layers {layer_ranges(layers)} become {form}"
                for layers, form in ((message.to_sharded, "sharded"), (message.to_whole, "whole"))
                if layers
            )
            if message.attention is not None:
                turns += f", attention becomes {ATTENTION_NAMES[message.attention]}"
            return (
                f"{message.engine}: plan {message.plan} of the {message.origin} begins,"
                f" {copied}{turns}{predicted}"
            )
        case MigrationStaged():
            return (
                f"{message.engine}: handover {message.number + 1} of {message.plan} is staged,"
                f" {byte_size(message.bytes)} in {message.seconds:.2f} s{_forms(message.placement)}"
            )
        case MigrationCommitted():
            done = f"; plan {message.plan} is done" if message.last else ""
            return (
                f"{message.engine}: handover {message.number + 1} committed, epoch {message.epoch} is"
                f" served{done}"
            )
        case MigrationAborted():
            return f"{message.engine}: plan {message.plan} is given up: {message.reason}"
        case PlacementCommitted(plan=None):
            return f"{message.engine} serves epoch {message.placement.epoch}"
    return None


def _planner_line(message: Message, homes: Mapping[int, int]) -> str | None:
    match message:
        case PlanEvaluated():
            return (
                f"{message.engine}: plan {message.plan} is evaluated: {message.verdict}, plan discount"
                f" {message.plan_discount:.2f}: {message.reason}"
            )
        case PopularityShifted():
            moved = f", most in layers {listed(message.layers, LISTED_LAYERS)}" if message.layers else ""
            by = f"{message.divergence:.4f} nats of {message.threshold:.4f} that chance explains"
            return (
                f"popularity of {message.model}"
                f" {'is stable again' if message.settled else f'shifted by {by}{moved}'}"
            )
        case HomesPublished() if homes.get(message.worker_id) != message.version:
            none = "" if message.homes else ", none"
            return (
                f"{message.engine}: new homes of clusters from epoch {message.epoch} on{none}:"
                f" {message.reason}"
            )
    return None


def _operator_line(message: Message) -> str | None:
    match message:
        case EngineJoined():
            return f"{message.engine} joined: {message.model}, {len(message.urls)} ranks"
        case EngineLeft():
            return f"{message.engine} left: {message.reason}"
        case RankDrained():
            place = message.engine if message.rank is None else f"{message.engine}/{message.rank}"
            return (
                f"{place} {'takes no new requests' if message.draining else 'takes new requests again'}"
                + (f": {message.reason}" if message.reason else "")
            )
        case ConfigChanged():
            changed = (
                ", ".join(f"{key} = {now}" for key, (_, now) in message.changed.items()) or "nothing differs"
            )
            return f"settings of {message.part}: " + (
                f"refused: {message.refused}" if message.refused is not None else changed
            )
    return None


def _forms(placement: PlacementRecord) -> str:
    """Return which layers of an epoch are sharded, and whether its attention is; empty: nothing is."""
    sharded = f"; layers {layer_ranges(placement.sharded)} are sharded then" if placement.sharded else ""
    return sharded + ("; attention is tensor-parallel then" if placement.attention == "tp" else "")


def _change(before: LoopFigures, after: LoopFigures) -> str:
    saved = 1e3 * (before.step_seconds - after.step_seconds)
    step = f"step {abs(saved):.3g} ms {'shorter' if saved >= 0 else 'longer'}"
    return f"predicted remote ranks {before.remote_ranks:.3f} > {after.remote_ranks:.3f}, {step}"
