"""Memory of ranks as a table and as JSON: expert cells by use, other weights, KV pool and communicators,
beside the resident size of the process."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.memory import STAGING, MemoryItems, memory_of_ranks
from deploy.client.migrations import NoSuchEngine
from deploy.client.placements import placements_of
from deploy.process import FAILURE, print_error
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.output import console, fail, in_json, printable, show, table
from fleet.text import byte_size, listed

HEADINGS = {
    "whole_experts": "experts of whole layers",
    "sharded_experts": "experts of sharded layers",
    "empty_slots": "empty slots",
    "spare_cells": "spare cells",
    "staging": "staging",
    "attention": "attention",
    "other_weights": "other weights",
    "kv_pool": "KV pool",
    "communicators": "communicators",
    "shared_with_ranks": "shared with other ranks",
    "libraries": "libraries",
    "runtime": "interpreter",
    "other": "other",
}
"""Headings of `MemoryItems.items`."""
COLUMNS = 8
"""Limit on the ranks in one table."""
Memory = Sequence[MemoryItems | str]
"""By rank: its memory, or the reason why it is not known."""


def show_memory(bus_config: BusConfig, engine: str | None, *, as_json: bool) -> None:
    """Print the memory of the ranks of one engine or (None) of all. Ends the command with status 1 if there
    is no such engine, or a rank does not state its memory."""

    async def ask(bus: Bus, subjects: Subjects) -> dict[str, Memory]:
        return {
            name: await memory_of_ranks(bus, subjects, name, one.joined.worker_id, one.now.ranks)
            for name, one in (await placements_of(bus, subjects, engine)).items()
        }

    try:
        found = on_bus(bus_config, ask)
    except NoSuchEngine as error:
        fail(str(error))
    if as_json:
        show(in_json({name: [as_record(one) for one in ranks] for name, ranks in found.items()}))
    elif not found:
        console().print("no engine with experts has joined")
    else:
        for name, ranks in found.items():
            _show_engine(name, ranks)
    failures = [line for name, ranks in found.items() for line in _failures(name, ranks)]
    for line in failures:
        print_error(line)
    if failures:
        raise typer.Exit(FAILURE)


def as_record(one: MemoryItems | str) -> dict[str, Any]:
    """Return the memory of a rank as a record for programs: sizes in bytes, null where unknown."""
    if isinstance(one, str):
        return {"refused": one}
    described = one.described
    return {
        "items": one.items,
        "resident": one.resident,
        "resident_shared": described.resident_shared if one.resident else None,
        "cell_bytes": described.cell_bytes,
        "cells": described.cells,
        "ranks_in_process": described.ranks_in_process,
        "note": described.note,
    }


def _show_engine(name: str, ranks: Memory) -> None:
    stated = [(rank, one) for rank, one in enumerate(ranks) if isinstance(one, MemoryItems)]
    for begin in range(0, len(stated), COLUMNS):
        some = stated[begin : begin + COLUMNS]
        table((name, *(f"rank {rank}" for rank, _ in some)), _rows([one for _, one in some]))
    for rank, one in stated:
        if moving := [f"{one.described.cells[use]} {use}" for use in STAGING if one.described.cells.get(use)]:
            console().print(f"rank {rank} has cells in staging: {', '.join(moving)}", markup=False)
    for note in dict.fromkeys(one.described.note for _, one in stated if one.described.note):
        console().print(printable(note), markup=False)


def _rows(ranks: Sequence[MemoryItems]) -> Iterator[tuple[str, ...]]:
    for item, heading in HEADINGS.items():
        yield heading, *(_size(one.items[item]) for one in ranks)
    yield "resident size of the process", *(_size(one.resident) for one in ranks)
    shared = (one.described.resident_shared if one.resident else None for one in ranks)
    yield "of it in shared memory", *map(_size, shared)


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"-{byte_size(-size)}" if size < 0 else byte_size(size)


def _failures(name: str, ranks: Memory) -> Iterator[str]:
    """Describe the ranks that do not state their memory: a line for each reason."""
    reasons: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        if isinstance(one, str):
            reasons.setdefault(one, []).append(rank)
    for reason, numbers in reasons.items():
        yield f"{name} rank{'s' * (len(numbers) > 1)} {listed(numbers)}: {printable(reason)}"
