"""Files with a whole map of experts, for engines that move their experts themselves: vLLM and SGLang."""

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from engine_adapter.vllm.wire import map_digest
from fleet.placement import Placement

MAX_BYTES = 64 << 20
"""Largest map file that is read."""
MapFormat = Literal["vllm", "sglang"]


class VllmMap(msgspec.Struct, frozen=True, kw_only=True):
    """A map for vLLM. `roost migrate --map` brings it into force; vLLM itself reads no such file (#49572 and
    #41141 are open)."""

    layers: int
    """MoE layers"""
    experts: int
    ranks: int
    digest: str
    """`engine_adapter.vllm.wire.map_digest` of the map, by which plugin and agent name it too"""
    physical_to_logical_map: list[list[int]]
    """[layers][slots], rank-major"""


def encoded(placement: Placement, form: MapFormat, dense_layers: int = 0) -> bytes:
    """Return a map file. dense_layers: layers without experts before the first MoE layer, which SGLang counts
    too."""
    table = placement.expert_of_slot
    if form == "vllm":
        found = VllmMap(
            layers=placement.layers,
            experts=placement.experts,
            ranks=placement.ranks,
            digest=map_digest(table, placement.experts),
            physical_to_logical_map=table.tolist(),
        )
        return msgspec.json.encode(found)
    # SGLang's rows of dense layers are read, checked and never used; these are its own default.
    unused = np.tile(np.arange(table.shape[1]) % placement.experts, (dense_layers, 1))
    return msgspec.json.encode({"physical_to_logical_map": [*unused.tolist(), *table.tolist()]})


def read(file: Path) -> Placement:
    """Read a vLLM map. ValueError states what is wrong with the file."""
    try:
        with file.open("rb") as source:
            found = msgspec.json.decode(source.read(MAX_BYTES), type=VllmMap)
        table = np.array(found.physical_to_logical_map, np.int16)
        placement = Placement(table, experts=found.experts, ranks=found.ranks, duplicates=True)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{file}: no map can be read from it: {error}") from error
    if (
        placement.layers != found.layers
        or map_digest(placement.expert_of_slot, found.experts) != found.digest
    ):
        raise ValueError(f"{file}: the map does not match its digest {found.digest}; write it anew")
    return placement
