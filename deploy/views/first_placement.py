"""First placement for an engine that does not run yet, from a load recorded elsewhere; needs no fleet."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.terminal.output import USAGE, console, fail, in_json, note, show, table
from deploy.views.map_files import MapFormat, encoded
from deploy.views.popularity import loaded
from fleet.dispatch import loads
from fleet.placement import EMPTY, Placement, linear
from migration.model.cost_model import balance
from migration.solvers.full_placement import bound, full_placement
from migration.solvers.full_tables import completed


def show_first_placement(
    file: Path,
    ranks: int,
    slots_per_rank: int | None,
    nodes: int,
    out: Path | None,
    *,
    as_json: bool,
    form: MapFormat | None = None,
    dense_layers: int = 0,
) -> None:
    """Place the experts of a recorded load on the ranks, print the resulting balance, and write the placement
    to `out`. form: as a whole map for another system; None: for Roost's own engines. dense_layers: as in
    `map_files.encoded`."""
    load, _ = loaded(file)
    if ranks % nodes:
        fail(f"{ranks} ranks do not divide by {nodes} nodes", USAGE)
    slots = slots_per_rank or -(-load.experts // ranks)
    try:
        placement = first_placement(load.counts, ranks, slots, nodes)
        if form is not None:
            placement = without_empty_slots(placement, load.counts)
    except ValueError as error:
        fail(str(error), USAGE)
    if out is not None:
        write(placement, out, form, dense_layers)
    found = as_record(placement, load.counts, file)
    if as_json:
        show(in_json(found))
        return
    console().print(
        f"[bold]{file}[/bold]: {load.layers} layers x {load.experts} experts on {ranks} ranks of {slots}"
        f" slots, {found['redundant_slots']} redundant per layer"
    )
    rows = [(name, *(f"{found[key][kind]:.3f}" for kind in ("mean", "min"))) for name, key in _ROWS]
    table(("balance", "mean of layers", "worst layer"), rows)
    if out is not None:
        use = {
            None: f'an engine begins with it by: placement = "{out}" and slots_per_rank = {slots} in [engine]'
            " or [simulated]",
            "vllm": f"bring it into force by: roost migrate --map {out} --to ENGINE (vLLM reads no such file"
            " itself)",
            "sglang": f"SGLang begins with it by: --init-expert-location {out} --ep-num-redundant-experts"
            f" {ranks * slots - load.experts}",
        }
        note(f"wrote {out}; {use[form]}")


_ROWS = (("experts in order", "in_order"), ("this placement", "placed"), ("no placement can exceed", "bound"))


def first_placement(load: NDArray[Any], ranks: int, slots_per_rank: int, nodes: int = 1) -> Placement:
    """Return the best-balanced placement for a load [layers, experts] under even shares. Ranks are numbered
    node by node. Raises ValueError if experts do not fit."""
    node = np.arange(ranks) // (ranks // nodes)
    return Placement(
        full_placement(load, ranks, slots_per_rank, node=node if nodes > 1 else None),
        experts=load.shape[1],
        ranks=ranks,
    )


def without_empty_slots(placement: Placement, load: NDArray[Any]) -> Placement:
    """Return the placement with further replicas in its empty slots. Raises ValueError if a rank has more
    slots than there are experts."""
    table = completed(placement.expert_of_slot, load, placement.ranks)
    return Placement(table, experts=placement.experts, ranks=placement.ranks)


def as_record(placement: Placement, load: NDArray[Any], file: Path) -> dict[str, Any]:
    """Return the balance as a record for programs."""
    layers, experts = load.shape
    ranks, slots = placement.ranks, placement.slots_per_rank
    most = bound(load, ranks, slots)
    in_order = linear(layers=layers, experts=experts, ranks=ranks)
    return {
        "file": str(file),
        "layers": layers,
        "experts": experts,
        "ranks": ranks,
        "slots_per_rank": slots,
        "redundant_slots": ranks * slots - experts,
        "empty_slots": int((placement.expert_of_slot == EMPTY).sum()),
        "in_order": _even(in_order, load),
        "placed": _even(placement, load),
        "bound": {"mean": float(most.mean()), "min": float(most.min())},
    }


def _even(placement: Placement, load: NDArray[Any]) -> dict[str, float]:
    """Return the balance when the requests of all ranks have the same demand."""
    demand = np.broadcast_to(np.asarray(load, np.float64), (placement.ranks, *load.shape)) / placement.ranks
    found = balance(loads(placement, demand, np.zeros(placement.ranks, np.intp)))
    return {"mean": float(found.mean()), "min": float(found.min())}


def write(placement: Placement, out: Path, form: MapFormat | None = None, dense_layers: int = 0) -> None:
    """Write the placement as JSON of a PlacementRecord, or as a whole map; end the command if that fails."""
    content = (
        msgspec.json.encode(placement.record()) if form is None else encoded(placement, form, dense_layers)
    )
    try:
        out.write_bytes(content)
    except OSError as error:
        fail(f"cannot write {out}: {error}", USAGE)
