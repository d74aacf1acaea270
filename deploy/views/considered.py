"""Layouts of a model on hardware that is only considered, as text and as JSON: no bus and no engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from deploy.terminal.output import USAGE, console, fail, table
from fleet.layout_times import LayoutName
from fleet.text import byte_size, duration
from migration.hardware.machines import NODE_GPUS, Machine, machine_named
from migration.hardware.memory import MEMORY_FRACTION, kv_capacity, memory_table
from migration.hardware.models import MODELS, ConsideredModel, model_of_config
from migration.hardware.sizes import expert_sizes, kv_sizes
from migration.hardware.switch_times import KV_TOKENS, switch_times

LAYOUTS: tuple[LayoutName, ...] = ("ep", "experts-tp", "tp")
_KIB = 1024
UNKNOWN = "unknown"


class Considered(NamedTuple):
    """A model on a machine, as the options name them."""

    model: ConsideredModel
    machine: Machine
    ranks: int
    context: int


def considered(model: str, hardware: str, ranks: int, context: int) -> Considered:
    """Resolve the options. Ends the command with the remedy if one of them names nothing known."""
    if ranks < 2:
        fail(f"--ranks must be at least 2, not {ranks}: one rank has one layout", USAGE)
    if ranks > NODE_GPUS and ranks % NODE_GPUS:
        fail(f"--ranks above {NODE_GPUS} must be whole nodes of {NODE_GPUS} GPUs, not {ranks}", USAGE)
    if context < 1:
        fail(f"--context must be at least 1 token, not {context}", USAGE)
    try:
        return Considered(_model(model), machine_named(hardware), ranks, context)
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)


def _model(name: str) -> ConsideredModel:
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a config.json nor one of {', '.join(MODELS)}; give the path of the"
            " model's config.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{name}: is not JSON ({error}); give the path of the model's config.json"
        ) from error
    if not isinstance(raw, dict):
        raise ValueError(f"{name}: must be a JSON object, as in Hugging Face's config.json")  # noqa: TRY004
    return model_of_config(name, raw)


def show_sizes(one: Considered) -> None:
    """Print sizes, memory, capacity and switch times."""
    for title, head, rows in sections(one):
        console().print(title, markup=False)
        table(head, rows)
        console().print()


Section = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, headings and rows of a table."""


def sections(one: Considered) -> Iterator[Section]:
    """Yield the tables of sizes."""
    model, machine, ranks, _ = one
    kv, experts, memory = kv_sizes(model, ranks), expert_sizes(model, ranks), memory_table(*one[:3])
    yield (
        f"{model.name} on {ranks} GPUs: {machine.title}",
        ("layout", "can be served", "KV tokens that fit", "longest request"),
        [
            (layout, f"no: {refusal}", "", "")
            if (refusal := refusal_of(one, layout))
            else (layout, "yes", *(f"{count:,}" for count in _capacity(one, layout)))
            for layout in LAYOUTS
        ],
    )
    yield (
        "Bytes",
        ("part", "size"),
        [
            ("experts of a GPU", byte_size(experts.total)),
            ("of one layer, and so of a spare layer", byte_size(experts.layer)),
            ("received by a GPU as all layers turn over", byte_size(experts.moved)),
            ("KV of a token, EP", _kib(kv.ep)),
            (f"KV of a token, TP, all ranks ({kv.copies} with the same head)", _kib(kv.tp)),
            ("moved between GPUs per token, EP to TP", _kib(kv.moved_to_tp)),
            ("moved between GPUs per token, TP to EP", _kib(kv.moved_to_ep)),
        ],
    )
    fits = "KV pool, what remains" if memory.kv_pool > 0 else "does not fit: beyond the budget by"
    yield (
        f"Memory of a GPU that can serve all layouts: {MEMORY_FRACTION:.0%} of {byte_size(machine.memory)}",
        ("item", "size", "note"),
        [
            *((line.name, _size(line.bytes), line.note) for line in memory.lines),
            (fits, byte_size(abs(memory.kv_pool)), ""),
        ],
    )
    yield (
        f"Switch, {_paths(ranks)}; KV of {KV_TOKENS:,} tokens in flight",
        ("link", "weights", "KV to TP", "KV to EP", "rate", "source"),
        [
            (
                time.rate.name,
                _seconds(time.weights),
                _seconds(time.kv_to_tp),
                _seconds(time.kv_to_ep),
                UNKNOWN
                if time.rate.bytes_per_second is None
                else f"{time.rate.bytes_per_second / 1e9:.3g} GB/s {'floor' if time.rate.is_floor else ''}",
                time.rate.source,
            )
            for time in switch_times(model, machine, ranks)
        ],
    )


def _paths(ranks: int) -> str:
    if ranks <= NODE_GPUS:
        return "if all bytes take one link"
    return f"NVLink within nodes of {NODE_GPUS} GPUs and a network between them, at once"


def sizes_record(one: Considered) -> dict[str, Any]:
    """Return the sizes as a record for programs: bytes and seconds, null where unknown."""
    model, machine, ranks, context = one
    kv, experts, memory = kv_sizes(model, ranks), expert_sizes(model, ranks), memory_table(*one[:3])
    return {
        "model": model.name,
        "hardware": machine.name,
        "ranks": ranks,
        "context": context,
        "refused": {layout: refusal_of(one, layout) or None for layout in LAYOUTS},
        "kv_tokens": {layout: _capacity(one, layout)[0] for layout in LAYOUTS},
        "longest_request": {layout: _capacity(one, layout)[1] for layout in LAYOUTS},
        "experts": {"gpu": experts.total, "layer": experts.layer, "moved": experts.moved},
        "kv_token": {
            "ep": kv.ep,
            "tp": kv.tp,
            "copies": kv.copies,
            "moved_to_tp": kv.moved_to_tp,
            "moved_to_ep": kv.moved_to_ep,
        },
        "memory": {
            "items": {line.name: line.bytes for line in memory.lines},
            "budget": memory.budget,
            "kv_pool": memory.kv_pool,
        },
        "switch": [
            {
                "link": time.rate.name,
                "bytes_per_second": time.rate.bytes_per_second,
                "floor": time.rate.is_floor,
                "source": time.rate.source,
                "weights": time.weights,
                "kv_to_tp": time.kv_to_tp,
                "kv_to_ep": time.kv_to_ep,
                "kv_tokens": KV_TOKENS,
            }
            for time in switch_times(model, machine, ranks)
        ],
    }


def refusal_of(one: Considered, layout: LayoutName) -> str:
    """Return why a layout cannot be served on this hardware; empty: it can."""
    pool = memory_table(*one[:3]).kv_pool
    short = f"needs {byte_size(-pool)} more on each GPU; use more ranks" if pool <= 0 else ""
    return one.model.refusal(layout, one.ranks) or short


def tokens_that_fit(one: Considered, layout: LayoutName) -> int:
    """Return the KV tokens that the engine has room for in a layout."""
    return _capacity(one, layout)[0]


def _capacity(one: Considered, layout: LayoutName) -> tuple[int, int]:
    capacity = kv_capacity(one.model, memory_table(*one[:3]), one.ranks, layout)
    return capacity.engine, capacity.request


def _size(size: float | None) -> str:
    return UNKNOWN if size is None else byte_size(size)


def _kib(size: float) -> str:
    return f"{size / _KIB:.4g} KiB"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return duration(seconds) if 0 < seconds < 1 else f"{seconds:.3g} s"
