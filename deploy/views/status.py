"""`roost status`: engines, ranks, their load and epochs, and the loop's past and planned actions, in one
screenful."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from rich.text import Text

from bus import Bus, BusError, StoreUse
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.control_loop import NoAnswer, described
from deploy.client.fleet_status import EngineNow, as_record, engines_now
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import USAGE, fail, in_json, printable, show
from deploy.views.backends import backend_lines
from deploy.views.loop import engine_report, figures, in_rows, overview, say, wrapped
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engine_kinds import ABILITIES, KINDS, stated_abilities
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import LoopDescribed
from fleet.text import counted
from router.api.backend_record import BackendStatus

logger = logging.getLogger(__name__)
HEIGHT = 40
"""lines of a screen"""
MIB = 2**20
REMEDIES = {
    "log": "raise max_bytes of the stream on the NATS server",
    "claims": "raise max_bytes of the bucket on the NATS server; names and leases can no longer be claimed",
    "blobs": (
        "raise max_bytes of the bucket on the NATS server; new tokenizers and plans can no longer be stored"
    ),
    "parcels": (
        "raise max_bytes or lower max_age of the bucket on the NATS server; large messages are dropped"
        " meanwhile"
    ),
}
"""remedy for a full store, by store"""
MAX_RANKS = 16
"""most ranks with a line each; a larger engine has one line"""
Detail = Literal["whole", "brief", "rows"]
"""level of detail of the loop's report per engine; rows: one line"""
_FORMS: tuple[tuple[bool, Detail], ...] = (
    (True, "whole"),
    (False, "whole"),
    (False, "brief"),
    (True, "rows"),
    (False, "rows"),
)
"""whether each rank has a line, and the level of detail; the fullest first"""
Figures = Mapping[str, LoopFigures]
NOTHING: Figures = {}
Loop = LoopDescribed | NoAnswer
"""the planner's answer, or the reason for its absence"""


def show_status(
    bus_config: BusConfig,
    routers: Sequence[str],
    engine: str | None,
    backends: Sequence[BackendStatus] = (),
    *,
    as_json: bool,
) -> None:
    """Print the fleet, or one engine; and the URLs of single router processes."""

    async def ask(
        bus: Bus, subjects: Subjects
    ) -> tuple[tuple[list[EngineNow], dict[str, int]], Loop, tuple[StoreUse, ...]]:
        return await asyncio.gather(engines_now(bus, subjects), loop_of(bus, subjects), stores_of(bus))

    (engines, rejected), loop, stores = on_bus(bus_config, ask)
    if engine is not None:
        engines, loop = only(engine, engines, loop)
    if as_json:
        parts = {
            "nats": bus_config.where,
            "namespace": bus_config.namespace,
            "engines": [as_record(one) for one in engines],
            "rejected": rejected,
        }
        show(
            in_json(
                {
                    **parts,
                    "routers": list(routers),
                    "backends": backends,
                    "stores": stores,
                    **loop_record(loop),
                }
            )
        )
        return
    lines = [
        Text(f"NATS {bus_config.where}, namespace {bus_config.namespace}: {counted(len(engines), 'engine')}")
    ]
    lines += alarms(stores)
    if routers:
        lines.append(Text(f"router processes, each alone: {' '.join(routers)}"))
    lines += [Text(line) for line in backend_lines(backends)] if backends else []
    say([*lines, *fitting(engines, loop, time.time(), HEIGHT - len(lines))])


async def stores_of(bus: Bus) -> tuple[StoreUse, ...]:
    """Return how full the stores are; empty if this bus user has no right to look."""
    try:
        return await bus.stores()
    except BusError as error:
        logger.warning("how full the stores are cannot be seen: %s", error)
        return ()


def alarms(stores: Iterable[StoreUse]) -> list[Text]:
    """Return one line per store of the bus that is (nearly) full and rejects new data."""
    return [
        Text(
            f"ALARM: the store for {one.store} is full: {one.used / MIB:.1f} of {one.capacity / MIB:.1f} MiB;"
            f" {REMEDIES[one.store]}",
            "bold red",
        )
        for one in stores
        if one.alarming
    ]


async def loop_of(bus: Bus, subjects: Subjects) -> Loop:
    """Return the planner's state, or the reason for its absence."""
    try:
        return await described(bus, subjects)
    except NoAnswer as error:
        return error
    except BusError as error:
        return NoAnswer(str(error))


def loop_record(loop: Loop) -> dict[str, LoopDescribed | str | None]:
    """Return the loop's state as a record for programs."""
    return (
        {"loop": None, "loop_unknown": str(loop)}
        if isinstance(loop, NoAnswer)
        else {"loop": loop, "loop_unknown": None}
    )


def only(name: str, engines: Sequence[EngineNow], loop: Loop) -> tuple[list[EngineNow], Loop]:
    """Select one engine; end the command if there is none of that name."""
    found = [one for one in engines if one.joined.engine == name]
    if not found:
        fail(
            f"no engine {name!r}; there are: {', '.join(one.joined.engine for one in engines) or 'none'}",
            USAGE,
        )
    if isinstance(loop, NoAnswer):
        return found, loop
    return found, LoopDescribed(
        **{field: getattr(loop, field) for field in loop.__struct_fields__ if field != "engines"},
        engines=tuple(one for one in loop.engines if one.engine == name),
    )


def fitting(
    engines: Sequence[EngineNow], loop: Loop, now: float, height: int, live: Figures = NOTHING
) -> list[Text]:
    """Return engines and loop, in full if the screen has room; else in fewer lines. live: recent
    measurements, by engine."""
    shorter: list[Text] = []
    for each, detail in _FORMS:
        shorter = [
            *(line for one in engines for line in engine_lines(one, each=each)),
            *loop_lines(loop, now, detail, live),
        ]
        if len(shorter) <= height:
            break
    return shorter


def engine_lines(engine: EngineNow, *, each: bool) -> Iterator[Text]:
    """Return the lines of an engine and its ranks: one per rank, or one for all."""
    joined, beat = engine.joined, engine.heartbeat
    layout = "" if engine.layout is None else f", {engine.layout}"
    epoch = "silent" if beat is None else f"epoch {beat.epoch}"
    moving = (
        f"; plan {printable(engine.migrating)} is being carried out: roost top" if engine.migrating else ""
    )
    shared = "" if joined.capabilities.isolates_tenants else "; tenants share its KV cache"
    yield Text(f"{joined.engine}: {printable(joined.model)}{layout}, {epoch}{shared}{moving}", "bold")
    if each and joined.engine_kind:
        yield Text(f"  {printable(abilities(joined))}")
    if each and len(joined.urls) <= MAX_RANKS:
        yield Text(
            f"{'rank':>6}  {'state':6} {'running':>7} {'waiting':>7} {'prefill':>8} {'KV blocks':>11}  URL"
        )
        yield from (Text(line) for line in _ranks(engine))
    else:
        yield Text(_together(engine))


def abilities(joined: EngineJoined) -> str:
    """Return the kind of an engine, and what it states that it has and lacks."""
    stated = stated_abilities(joined)
    has = [ABILITIES[name].label for name, one in stated.items() if one]
    lacks = [ABILITIES[name].label for name, one in stated.items() if one is False]
    record = KINDS.get(joined.engine_kind)  # type: ignore[call-overload]
    title = joined.engine_kind if record is None else record.title
    untested = " (never run with the real engine)" if record is not None and record.untested else ""
    without = f"; without {', '.join(lacks)}" if lacks else ""
    return f"{title}{untested}: {', '.join(has) or 'nothing known'}{without}"


def _ranks(engine: EngineNow) -> Iterator[str]:
    joined = engine.joined
    most, last = joined.target_kv_blocks(engine.layout), len(joined.urls) - 1
    for rank, url in enumerate(joined.urls[: engine.targets]):
        load = engine.loads.get(rank, KvMetrics(worker_id=joined.worker_id))
        promised = (_or_dash(load.running), _or_dash(load.waiting), _or_dash(load.active_prefill_tokens))
        blocks = f"{_or_dash(load.kv_used_blocks)}/{most}" if most else "-"
        name = f"0-{last}" if engine.targets == 1 <= last else str(rank)
        yield (
            f"{name:>6}  {_state(engine, rank):6} {promised[0]:>7} {promised[1]:>7} {promised[2]:>8}"
            f" {blocks:>11}  {printable(url)}"
        )


def _together(engine: EngineNow) -> str:
    loads, ranks = engine.loads.values(), len(engine.joined.urls)
    drained = [str(rank) for rank in range(ranks) if engine.drained(rank) is not None]
    parts = [
        f"{ranks} ranks",
        f"running {_sum(load.running for load in loads)}",
        f"waiting {_sum(load.waiting for load in loads)}",
    ]
    parts += [f"prefill {_sum(load.active_prefill_tokens for load in loads)} tokens"]
    if most := engine.targets * engine.joined.target_kv_blocks(engine.layout):
        parts.append(f"KV blocks {_sum(load.kv_used_blocks for load in loads)}/{most}")
    if drained:
        parts.append(f"draining: {', '.join(drained)}")
    return f"  {', '.join(parts)}"


def _sum(numbers: Iterable[int | None]) -> int:
    return sum(number or 0 for number in numbers)


def _state(engine: EngineNow, rank: int) -> str:
    alive, reason = "silent" if engine.heartbeat is None else "alive", engine.drained(rank)
    return alive if reason is None else f"{alive}, draining" + (f": {printable(reason)}" if reason else "")


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def loop_lines(loop: Loop, now: float, detail: Detail = "whole", live: Figures = NOTHING) -> list[Text]:
    """Return the loop's actions and the recent measurements."""
    if isinstance(loop, NoAnswer):
        lines = wrapped(f"loop: {printable(str(loop))}")
        for name, found in live.items() if detail != "rows" else ():
            lines += [Text(printable(name), "bold"), *figures(None, found)]
        return lines
    lines = overview(loop, now)
    if not loop.engines:
        return [*lines, Text("the planner knows no engine with experts")]
    if detail == "rows" and len(loop.engines) > 1:
        return [*lines, *in_rows(loop, now)]
    for one in loop.engines:
        if len(loop.engines) > 1:
            lines.append(Text(f"{printable(one.engine)}, epoch {one.epoch}", "bold"))
        lines += engine_report(loop, one, now, live.get(one.engine), brief=detail != "whole")
    return lines
