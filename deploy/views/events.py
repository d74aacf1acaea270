"""Bus messages as lines of text or JSON: live, or replayed if they are stored."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from bus import Bus, Message, Received
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import in_json, show
from fleet.facts.activity import RequestOutcome, RequestProfile
from fleet.facts.demand import KeyedRows
from fleet.facts.migrations import LoopFigures
from fleet.layout import layer_ranges
from fleet.placement import PlacementRecord
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.requests.demand import RankPopularity
from fleet.signatures import PACKED, ClusterRecord

SHOWN = 8
"""Longest list that is printed in full; a longer one is printed as its length."""
KV_EVENTS = "KvEvents"
"""Name of a batch in Dynamo's untagged form."""


def show_events(
    bus_config: BusConfig, kinds: set[str], since: float | None, *, follow: bool, as_json: bool
) -> None:
    """Print messages of these kinds (all when empty): those stored in the last `since` seconds, if given,
    then new ones."""
    line = json_line if as_json else text_line

    async def print_all(bus: Bus, subjects: Subjects) -> None:
        async with aclosing(
            _received(bus, subjects) if since is None else _replayed(bus, subjects, since, follow)
        ) as source:
            async for received in source:
                if not kinds or kind_of(received.message) in kinds:
                    show(line(received))

    on_bus(bus_config, print_all)


def kind_of(message: Message) -> str:
    """Return the name of a message's kind, as --kind takes it."""
    return KV_EVENTS if isinstance(message, tuple) else type(message).__name__


async def _received(bus: Bus, subjects: Subjects) -> AsyncGenerator[Received, None]:
    async with bus.subscribe(subjects.everything) as subscription:
        async for received in subscription:
            yield received


async def _replayed(
    bus: Bus, subjects: Subjects, seconds: float, follow: bool
) -> AsyncGenerator[Received, None]:
    """Replay the messages on all stored subjects in order of time; then, with `follow`, continue with new
    ones."""
    past = [
        received
        for subject in subjects.stored
        async for received in bus.replay(subject, since=seconds, follow=False)
    ]
    for received in sorted(past, key=lambda received: received.published_at):
        yield received
    if not follow:
        return
    seen = {(received.publisher_id, received.sequence) for received in past}
    arrived: asyncio.Queue[Received] = asyncio.Queue(1024)

    async def pump(subject: str) -> None:
        async for received in bus.replay(subject, since=seconds):
            if (received.publisher_id, received.sequence) not in seen:
                await arrived.put(received)

    async with asyncio.TaskGroup() as tasks:
        for subject in subjects.stored:
            tasks.create_task(pump(subject), name=f"follow {subject}")
        while True:
            yield await arrived.get()


def text_line(received: Received) -> str:
    at = (
        time.strftime("%H:%M:%S", time.localtime(received.published_at))
        + f".{int(received.published_at * 1000) % 1000:03d}"
    )
    return f"{at} {kind_of(received.message):19} {_fields(received.message)}"


def _fields(message: Message) -> str:
    """Return the fields of a message in one line; tables as their shape."""
    if isinstance(message, tuple):
        return " ".join(
            f"[{routed.event.event_id} rank {routed.event.dp_rank} {_change(routed.event.data)}]"
            for routed in message
        )
    return " ".join(f"{name}={_value(getattr(message, name))}" for name in message.__struct_fields__)


def _change(data: Any) -> str:
    if isinstance(data, str):
        return data
    return (
        f"stored {len(data.stored.blocks)} blocks"
        if data.stored is not None
        else f"removed {len(data.removed.block_hashes)} blocks"
    )


def _value(value: Any) -> str:
    """Return a field's value as text; large values are summarised."""
    match value:
        case ExpertTable() | ExpertCounts():
            return _table_word(value)
        case PlacementRecord():
            sharded = f", layers {layer_ranges(value.sharded)} sharded" if value.sharded else ""
            attention = ", tensor-parallel attention" if value.attention == "tp" else ""
            slots = f"{value.ranks}x{value.slots_per_rank} slots"
            return f"[epoch {value.epoch}: {value.layers} layers, {slots}{sharded}{attention}]"
        case ClusterRecord():
            return (
                f"[version {value.version}: {value.clusters} clusters of {value.layers}x{value.experts},"
                f" sharpness {value.sharpness:.3g}]"
            )
        case KeyedRows():
            return f"[{len(value.keys) // 8} rows]"
        case LoopFigures():
            step = 1e3 * value.step_seconds
            return (
                f"[remote ranks {value.remote_ranks:.3f}, local {value.local:.1%}, balance"
                f" {value.balance:.3f}, step {step:.4g} ms]"
            )
        case msgspec.Struct():
            return (
                "("
                + " ".join(f"{name}={_value(getattr(value, name))}" for name in value.__struct_fields__)
                + ")"
            )
        case float():
            return f"{value:.6g}"
        case bytes():
            return _signature_word(value) if len(value) == PACKED else f"<{len(value)} bytes>"
        case dict():
            return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
        case tuple():
            return _tuple_word(value)
    return str(value)


def _table_word(value: ExpertTable | ExpertCounts) -> str:
    try:
        return f"[{value.layers}x{value.experts} sum {value.array().sum():.6g}]"
    except ValueError as error:
        return f"[unusable: {error}]"


def _signature_word(packed: bytes) -> str:
    """Return the clusters of a packed signature, by weight."""
    pairs = zip(packed[::2], packed[1::2], strict=True)
    return "[" + " ".join(f"{cluster}:{weight / 255:.2f}" for cluster, weight in pairs if weight) + "]"


def _tuple_word(values: tuple[Any, ...]) -> str:
    match values:
        case (RequestProfile(), *_):
            samples, blocks = (
                sum(one.sample is not None for one in values),
                sum(len(one.blocks) // 8 for one in values),
            )
            return (
                f"<{len(values)} requests, {sum(one.tokens for one in values)} tokens, {blocks} blocks,"
                f" {samples} whole profiles>"
            )
        case (RequestOutcome(), *_):
            known = sum(one.prefix != 0 for one in values)
            return f"<{len(values)} requests, {known} with a known prefix>"
        case (RankPopularity(), *_):
            return f"<{len(values)} ranks>"
    if len(values) > SHOWN and all(isinstance(value, float) for value in values):
        return f"<{len(values)} values, sum {sum(values):.6g}>"
    return (
        f"<{len(values)} values>"
        if len(values) > SHOWN
        else "(" + ", ".join(map(_value, values)) + ("," if len(values) == 1 else "") + ")"
    )


def json_line(received: Received) -> str:
    return in_json(
        {
            "kind": kind_of(received.message),
            "subject": received.subject,
            "publisher_id": str(received.publisher_id),
            "sequence": received.sequence,
            "published_at": received.published_at,
            "message": received.message,
        }
    )
