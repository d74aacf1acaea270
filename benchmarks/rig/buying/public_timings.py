"""Fit the prices of `migration/hardware/published_prices.json` to NVIDIA's published kernel timings.

    pip download aiconfigurator-core==0.12.0 --no-deps -d DIR && unzip DIR/*.whl -d DIR
    pip install pandas pyarrow
    python -m benchmarks.rig.buying.public_timings DIR/aiconfigurator_core/systems/data

Only prices are written, never the tables. Prints the error of every fit: root mean square of the relative
difference between the form and the sum of the tables, over sequences and contexts.
"""

import argparse
import functools
import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fleet.layout_times import LayoutName
from migration.hardware.models import MODELS, ConsideredModel
from migration.hardware.price_fit import Fitted, fitted, priced
from migration.hardware.step_form import (
    PARTS,
    PartName,
    attention_units,
    collectives_units,
    experts_units,
    own_sequences,
    projections_units,
    step_units,
)

FILE = Path(__file__).parents[3] / "migration/hardware/published_prices.json"
VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.14"}
NCCL = "2.29.2"
FOLDERS = {"h200-nvl": "h200_sxm", "h100": "h100_sxm"}
DTYPES = {16.0: "bfloat16", 8.0: "fp8_block", 4.25: "w4a16_mxfp4"}
RANKS = (2, 4, 8)
MOST = 2048
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CONTEXTS = (256, 1024, 4096, 16384)
ROUTINGS = {"balanced": "even", "power_law_1.2": "random"}
"""Routing of the published tables -> routing by which their work is counted."""
KV_LIMIT = 150e9
"""bytes of KV above which a cell of the comparison cannot exist"""


class Tables:
    """The published tables of one GPU and one kernel stack; times in seconds."""

    def __init__(self, root: Path, hardware: str, kernels: str) -> None:
        self._folder, self._kernels = root / FOLDERS[hardware], kernels

    @functools.cache  # noqa: B019 a few tables for the life of the program
    def _read(self, kind: str, name: str) -> pd.DataFrame:
        if name == "nccl_perf":
            folder = self._folder / kind / "nccl" / NCCL
        else:
            folder = self._folder / kind / self._kernels / VERSIONS[self._kernels]
        table = pd.read_parquet(folder / f"{name}.parquet")
        return table.assign(latency=table.latency / 1e3)

    def experts(
        self, model: ConsideredModel, layout: LayoutName, ranks: int, routing: str
    ) -> Iterator[tuple[int, float]]:
        """Yield (tokens of the engine, seconds of one layer)."""
        tp, ep = (1, ranks) if layout == "ep" else (ranks, 1)
        table = self._read("moe", "moe_perf")
        rows = table[
            (table.num_experts == model.experts)
            & (table.topk == model.top_k)
            & (table.inter_size == model.expert_intermediate)
            & (table.hidden_size == model.hidden)
            & (table.moe_dtype == DTYPES[model.expert_bits])
            & (table.moe_tp_size == tp)
            & (table.moe_ep_size == ep)
            & (table.distribution == routing)
            & (table.num_tokens <= MOST)
        ]
        yield from rows.groupby("num_tokens").latency.min().items()

    @functools.cache  # noqa: B019
    def _grid(self, dtype: str) -> dict[tuple[int, int], tuple[Any, Any]]:
        table = self._read("gemm", "gemm_perf")
        table = table[table.gemm_dtype == dtype].groupby(["n", "k", "m"]).latency.min().reset_index()
        return {key: (part.m.values, part.latency.values) for key, part in table.groupby(["n", "k"])}

    def product(self, dtype: str, rows: float, n: float, k: float) -> float:
        """Return the time of a matrix product, linear between the shapes of the table."""
        grid = self._grid(dtype)

        def at(n: int, k: int) -> float:
            key, larger = (n, k), 1.0
            if key not in grid:
                key = min(grid, key=lambda one: abs(math.log(one[0] / n)) + abs(math.log(one[1] / k)))
                larger = max(1.0, n * k / (key[0] * key[1]))
            return float(np.interp(rows, *grid[key])) * larger

        (n0, n1, right), (k0, k1, down) = (
            _bracket(sorted({key[axis] for key in grid}), value) for axis, value in ((0, n), (1, k))
        )
        beyond = max(1.0, n / n1)
        first = at(n0, k0) * (1 - right) + at(n1, k0) * right
        last = at(n0, k1) * (1 - right) + at(n1, k1) * right
        return beyond * (first * (1 - down) + last * down)

    def projections(self, model: ConsideredModel, share: int, rows: float) -> float:
        """Return the time of all projections, routers, dense parts and the output of a step."""
        dtype = DTYPES[model.dense_bits]
        hidden, heads = model.hidden, model.heads / share
        one: list[tuple[int, str, float, float]] = [
            (model.moe_layers, "bfloat16", model.experts, hidden),
            (1, "bfloat16", model.vocabulary / share, hidden),
        ]
        if model.latent is None:
            kv_heads = max(1.0, model.kv_heads / share)
            width = (heads + 2 * kv_heads) * model.head_dim
            one += [
                (model.layers, dtype, width, hidden),
                (model.layers, dtype, hidden, heads * model.head_dim),
            ]
        elif self._kernels != "vllm":  # there the module of attention includes its projections
            inner = model.latent
            one += [
                (model.layers, dtype, inner.query_rank + inner.cached, hidden),
                (model.layers, dtype, heads * (inner.nope + inner.rope), inner.query_rank),
                (2 * model.layers, "bfloat16", heads * inner.nope, inner.latent),
                (model.layers, dtype, hidden, heads * inner.value),
            ]
        for layers, width in (
            (model.moe_layers, model.shared_intermediate),
            (model.layers - model.moe_layers, model.dense_intermediate),
        ):
            if layers and width:
                one += [
                    (layers, dtype, 2 * width / share, hidden),
                    (layers, dtype, hidden, width / share),
                ]
        return sum(count * self.product(kind, rows, n, k) for count, kind, n, k in one)

    @functools.cache  # noqa: B019
    def _attention_rows(self, model: ConsideredModel, share: int, window: int) -> dict[int, tuple[Any, Any]]:
        heads = model.heads // share
        if model.latent is None:
            kv_heads = max(1, model.kv_heads // share)
            table = self._read("attention", "generation_attention_perf")
            table = table[
                (table.head_dim == model.head_dim)
                & (table.window_size == window)
                & (table.num_key_value_heads == kv_heads)
                & (table.kv_cache_dtype == "bfloat16")
            ]
            known = min(table.num_heads.unique(), key=lambda one: abs(one - heads))
            table = table[table.num_heads == known]
        elif self._kernels == "vllm":
            table = self._read("mla", "mla_generation_module_perf")
            table = table[
                (table.num_heads == heads)
                & (table.kv_cache_dtype == "bfloat16")
                & (table.gemm_type == DTYPES[model.dense_bits])
            ]
        else:
            table = self._read("mla", "generation_mla_perf")
            table = table[(table.num_heads == heads) & (table.kv_cache_dtype == "bfloat16")]
        table = table[(table.step >= 127) & (table.step <= 33_000)]
        rows = table.groupby(["batch_size", "step"]).latency.min().reset_index()
        return {
            size: (part.step.values + 1, part.latency.values) for size, part in rows.groupby("batch_size")
        }

    def attention(self, model: ConsideredModel, share: int, context: float) -> Iterator[tuple[int, float]]:
        """Yield (sequences of the rank, seconds of one layer), for the batches that the table has."""
        windows = (0, model.window) if model.window else (0,)
        tables = [self._attention_rows(model, share, window) for window in windows]
        for size in sorted(set.intersection(*map(set, tables))):
            if all(table[size][0][-1] >= context for table in tables):
                yield size, float(np.mean([np.interp(context, *table[size]) for table in tables]))

    def collective(self, layout: LayoutName, ranks: int) -> tuple[Any, Any]:
        """Return gigabytes of a call and its seconds: of an all-reduce, or an all-gather and a
        reduce-scatter. Both tables count elements of 2 bytes: read as bytes, NCCL would reach half of
        NVLink's rate; and from 64 MB on, where stacks fall back to NCCL, the times of both are equal."""
        if layout == "tp":
            table = self._read("comm", "custom_allreduce_perf")
            table = table[(table.num_gpus == ranks) & table.backend.str.contains("graph")]
            rows = table.groupby("message_size").latency.min()
            return np.array(rows.index) * 2 / 1e9, rows.values
        table = self._read("comm", "nccl_perf")
        table = table[(table.num_gpus == ranks) & (table.nccl_dtype == "half")]
        gather, scatter = (
            table[table.op_name == name].groupby("message_size").latency.min()
            for name in ("all_gather", "reduce_scatter")
        )
        return np.array(gather.index) * 2 / 1e9, gather.values + np.interp(
            gather.index, scatter.index, scatter.values
        )


def _bracket(values: list[int], value: float) -> tuple[int, int, float]:
    """Return the neighbours of a value, and its position between them; the last one beyond the end."""
    low = max((one for one in values if one <= value), default=values[0])
    high = min((one for one in values if one >= value), default=values[-1])
    return low, high, 0.0 if high <= low else (value - low) / (high - low)


def part_fits(tables: Tables, model: ConsideredModel, layout: LayoutName, ranks: int) -> dict[str, Fitted]:
    """Return the prices of every part, and of experts under skew, as "skewed"."""
    share = ranks if layout == "tp" else 1
    found: dict[str, Fitted] = {}
    for name, distribution in (("experts", "balanced"), ("skewed", "power_law_1.2")):
        rows = list(tables.experts(model, layout, ranks, distribution))
        routing: Any = ROUTINGS[distribution]
        found[name] = fitted(
            [experts_units(model, layout, ranks, tokens, routing) for tokens, _ in rows],
            [model.moe_layers * seconds for _, seconds in rows],
        )
    sizes = [own for own in range(1, MOST + 1) if own in SEQUENCES]
    scale = 1 if layout == "tp" else ranks
    found["projections"] = fitted(
        [projections_units(model, layout, ranks, own * scale) for own in sizes],
        [tables.projections(model, share, own) for own in sizes],
    )
    rows = [
        (attention_units(model, layout, ranks, own * scale, context), model.layers * seconds)
        for context in CONTEXTS
        for own, seconds in tables.attention(model, share, context)
        if own * context * model.cached_token_bytes / share < KV_LIMIT
    ]
    found["attention"] = fitted([units for units, _ in rows], [seconds for _, seconds in rows])
    sizes_gb, seconds = tables.collective(layout, ranks)
    kept = (sizes_gb >= model.state_bytes / 1e9) & (sizes_gb <= MOST * model.state_bytes / 1e9 * 1.01)
    calls = collectives_units(model, layout, ranks, 1).calls
    found["collectives"] = fitted(
        [(calls, calls * size, 0.0, calls * math.sqrt(size)) for size in sizes_gb[kept]],
        [calls * one for one in seconds[kept]],
    )
    return found


def table_seconds(
    tables: Tables,
    model: ConsideredModel,
    layout: LayoutName,
    ranks: int,
    sequences: int,
    context: int,
    distribution: str,
) -> float | None:
    """Return the sum of the tables for one step; None if the attention was not timed."""
    share = ranks if layout == "tp" else 1
    own = own_sequences(layout, ranks, sequences)
    rows = list(tables.attention(model, share, context))
    if not rows or rows[-1][0] < own:
        return None
    attention = float(np.interp(own, *zip(*rows, strict=True)))
    experts = np.interp(sequences, *zip(*tables.experts(model, layout, ranks, distribution), strict=True))
    sizes, seconds = tables.collective("tp" if layout == "tp" else "ep", ranks)
    units = collectives_units(model, layout, ranks, sequences)
    collective = float(np.interp(units.gigabytes / units.calls, sizes, seconds)) * units.calls
    return (
        model.layers * attention
        + model.moe_layers * float(experts)
        + tables.projections(model, share, own)
        + collective
    )


def errors(
    tables: Tables,
    model: ConsideredModel,
    layout: LayoutName,
    ranks: int,
    prices: dict[PartName, Any],
    distribution: str,
) -> float:
    """Return the root mean square of the relative error of the whole step."""
    found = []
    routing: Any = ROUTINGS[distribution]
    for sequences, context in product(SEQUENCES, CONTEXTS):
        seconds = table_seconds(tables, model, layout, ranks, sequences, context, distribution)
        if seconds is not None:
            units = step_units(model, layout, ranks, sequences, context, routing)
            found.append(sum(priced(prices[part], units[part]) for part in PARTS) / seconds - 1)
    return float(np.sqrt(np.mean(np.square(found))))


def _short(prices: tuple[float, ...]) -> list[float]:
    return [float(f"{one:.4g}") for one in prices]


def record(root: Path, hardware: str, kernels: str, name: str, ranks: int) -> dict[str, Any] | None:
    """Return the prices of one model, or None if its experts were not timed by these kernels."""
    tables, model = Tables(root, hardware, kernels), MODELS[name]
    try:
        fits = {layout: part_fits(tables, model, layout, ranks) for layout in ("ep", "tp")}
    except ValueError:
        return None
    prices: dict[Any, dict[Any, list[float]]] = {
        layout: {part: _short(one.prices) for part, one in parts.items()} for layout, parts in fits.items()
    }
    found: dict[str, dict[str, float]] = {}
    for routing, distribution in (("experts", "balanced"), ("skewed", "power_law_1.2")):
        whole: dict[Any, Any] = {
            layout: {**{part: prices[layout][part] for part in PARTS}, "experts": prices[layout][routing]}
            for layout in prices
        }
        whole["experts-tp"] = whole["ep"] | {"experts": whole["tp"]["experts"]}
        found[routing] = {
            layout: round(errors(tables, model, layout, ranks, whole[layout], distribution), 4)
            for layout in whole
        }
    by_part = [f"{part} {fits['tp'][part].error:.0%}/{fits['ep'][part].error:.0%}" for part in fits["tp"]]
    print(
        f"{hardware:9} {kernels:7} {name:14} {ranks} ranks: "
        + ", ".join(f"{layout} {error:.1%}" for layout, error in found["experts"].items())
        + "; skewed "
        + ", ".join(f"{layout} {error:.1%}" for layout, error in found["skewed"].items())
        + "; parts "
        + ", ".join(by_part)
    )
    return {
        "hardware": hardware,
        "kernels": kernels,
        "model": name,
        "ranks": ranks,
        "prices": prices,
        "errors": found["experts"],
        "skewed_errors": found["skewed"],
    }


def main() -> None:
    """Fit and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path, help="systems/data of the unpacked package")
    root = parser.parse_args().root
    records = [record(root, *key) for key in product(FOLDERS, VERSIONS, MODELS, RANKS)]
    head = {
        "source": "NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0), tables systems/data",
        "date": "tables collected until August 2026",
        "kernels": {name: f"{name} {version}" for name, version in VERSIONS.items()},
        "collectives": (f"all-reduce of each stack in graphs; all-gather and reduce-scatter of NCCL {NCCL}"),
        "sequences": [SEQUENCES[0], SEQUENCES[-1]],
        "contexts": [CONTEXTS[0], CONTEXTS[-1]],
    }
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in records if one is not None)
    text = json.dumps(head, indent=1)[:-2] + ',\n "fits": [\n' + lines + "\n]}\n"
    json.loads(text)
    FILE.write_text(text)


if __name__ == "__main__":
    main()
