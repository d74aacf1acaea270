"""Layouts: the distribution of attention and experts over the ranks of one engine, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.experts import BYTES_PER_VALUE, ModelShape

ALIGNED = 64
"""Bytes at whose multiples weights begin. A matrix product may sum in another order when the alignment of its
operands differs."""


def check_ascending(layers: Sequence[int], where: str) -> None:
    """Raise ValueError unless these are numbers of layers, ascending, each once."""
    if any(layer < 0 for layer in layers) or any(later <= layer for layer, later in pairwise(layers)):
        raise ValueError(
            f"{where}: sharded layers must be numbers from 0 on, ascending, each once; not {list(layers)}"
        )


AttentionKind = Literal["dp", "tp"]
ATTENTION_NAMES: dict[AttentionKind, str] = {"dp": "data-parallel", "tp": "tensor-parallel"}


class AttentionLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Distribution of attention over an engine's ranks, as events state it beside a placement, which states
    it too (`PlacementRecord.attention`). In events of earlier releases the placement does not.
    """

    kind: AttentionKind = msgspec.field(name="attention")
    boundary: Literal[0] = 0
    """What records of earlier releases say: layers below it were sharded. No engine ever had such layers, so
    another value is refused"""


DP_ATTENTION = AttentionLayout(kind="dp")
TP_ATTENTION = AttentionLayout(kind="tp")


@dataclass(frozen=True, slots=True)
class Layout:
    """`(attention, sharded)`: the experts of a *sharded* layer are cut, and every rank holds a part of each;
    a layer that is not sharded is *whole*, and every expert lies with some ranks.

    EP = (dp, none), EXPERTS_TP = (dp, all), TP = (tp, all), TP_EP = (tp, none). Every (dp, any layers) can be
    served; (tp, some layers) is refused. ValueError if the layers are not ascending numbers.
    """

    attention: AttentionKind
    sharded: tuple[int, ...] = ()
    """MoE layers whose experts are sharded, ascending"""

    def __post_init__(self) -> None:
        check_ascending(self.sharded, "layout")

    @classmethod
    def of(cls, attention: AttentionLayout | None, sharded: tuple[int, ...]) -> "Layout | None":
        """Return the layout of an engine; None for an engine that states no attention, so no experts."""
        return None if attention is None else cls(attention.kind, sharded)

    def check_layers(self, layers: int) -> None:
        """Raise ValueError for tensor-parallel attention with some of the model's MoE layers sharded."""
        if self.attention == "tp" and 0 < len(self.sharded) < layers:
            raise ValueError(
                "layout: tensor-parallel attention needs the experts of every layer sharded, or of none; not"
                f" of {len(self.sharded)} of {layers}"
            )

    def check(self, shape: ModelShape, ranks: int) -> None:
        """Raise ValueError when a model of this shape cannot be served in this layout by the ranks."""
        if self.sharded and self.sharded[-1] >= shape.layers:
            raise ValueError(
                f"layout: sharded layer {self.sharded[-1]} is not one of the model's {shape.layers} MoE"
                " layers, which are numbered from 0"
            )
        self.check_layers(shape.layers)
        reason = (sharding_refusal(shape, ranks) if self.sharded else "") or (
            tp_refusal(shape, ranks) if self.attention == "tp" else ""
        )
        if reason:
            raise ValueError(f"layout: {reason}")

    def whole(self, layers: int) -> NDArray[np.intp]:
        """Return the layers that hold whole experts, ascending: int [n]. layers: MoE layers of the model."""
        sharded = set(self.sharded)
        return np.array([layer for layer in range(layers) if layer not in sharded], np.intp)

    def has_whole(self, layers: int) -> bool:
        """Return True if some layer holds whole experts. layers: MoE layers of the model."""
        return len(self.sharded) < layers

    @property
    def targets_are_ranks(self) -> bool:
        """True if each rank owns its requests (data-parallel attention). False: the engine is a single
        target.
        """
        return self.attention == "dp"

    def __str__(self) -> str:
        experts = f"layers {layer_ranges(self.sharded)} sharded" if self.sharded else "experts whole"
        return f"{self.attention}, {experts}"


EP = Layout(attention="dp")
"""Expert parallelism: data-parallel attention, whole experts distributed over the ranks."""
TP_EP = Layout(attention="tp")
"""Tensor-parallel attention, whole experts distributed over the ranks: vLLM's `--tensor-parallel-size` with
`--enable-expert-parallel`. The engine is one target, and no rank is nearer to a request than another.
"""


def sharding_refusal(shape: ModelShape, ranks: int) -> str:
    """Return why the experts of a layer cannot be cut into as many parts as there are ranks; empty: they can.

    A part holds I / P rows of each of gate, up and down (stored I-major), with their scales.
    """
    width = shape.expert_intermediate
    if width % ranks:
        return f"experts of intermediate size {width} do not divide into parts for {ranks} ranks"
    part = width // ranks
    if shape.scale_block and part % shape.scale_block:
        return (
            f"a part of {part} of the {width} intermediate rows, for {ranks} ranks, cuts a quantisation block"
            f" of {shape.scale_block} rows"
        )
    size = part * shape.hidden * BYTES_PER_VALUE[shape.dtype]
    if ranks > 1 and size % ALIGNED:
        return (
            f"a part of {part} x {shape.hidden} {shape.dtype} weights, for {ranks} ranks, is {size} bytes,"
            f" which is not a multiple of {ALIGNED}: the next weights would begin unaligned"
        )
    return ""


def tp_refusal(shape: ModelShape, ranks: int) -> str:
    """Return why attention cannot be split over the ranks; empty: it can, or the numbers of heads are not
    stated."""
    if shape.heads % ranks:
        return f"{shape.heads} attention heads do not divide among {ranks} ranks"
    if shape.kv_heads and shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{shape.kv_heads} KV heads neither divide among {ranks} ranks nor into them"
    return ""


def experts_tp(layers: int) -> Layout:
    """Return EXPERTS_TP: data-parallel attention, the experts of all MoE layers sharded."""
    return Layout(attention="dp", sharded=tuple(range(layers)))


def tp(layers: int) -> Layout:
    """Return TP: attention and the experts of all MoE layers sharded."""
    return Layout(attention="tp", sharded=tuple(range(layers)))


def layers_named(text: str, layers: int) -> tuple[int, ...]:
    """Parse the sharded layers of a layout: ep (none), experts-tp (all), or numbers and ranges like 0-3,7.

    layers: MoE layers of the model. ValueError names what cannot be read, and the remedy.
    """
    if text in ("ep", "experts-tp"):
        return () if text == "ep" else tuple(range(layers))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (number.strip() for number in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"layout {text!r}: use ep, experts-tp, tp, or the layers to be sharded, e.g. 0-3,7"
            )
        begin, end = int(first), int(last) if dash else int(first)
        if begin > end or end >= layers:
            raise ValueError(
                f"layout {text!r}: {part.strip()!r} names no layers; the model has MoE layers 0 to"
                f" {layers - 1}"
            )
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def layout_named(text: str, layers: int) -> Layout:
    """Parse a layout: tp, or with data-parallel attention what `layers_named` reads.

    layers: MoE layers of the model. ValueError names what cannot be read, and the remedy.
    """
    return tp(layers) if text == "tp" else Layout("dp", layers_named(text, layers))


def layer_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, runs shortened: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# KV (decision 0020)


def head_groups(ranks: int, kv_heads: int) -> int:
    """Return the groups into which tensor-parallel attention divides KV heads: min(ranks, kv_heads). 1 where
    neither divides the other, so that it is refused (`tp_refusal`), or the heads are not stated (0)."""
    divide = kv_heads > 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    return min(ranks, kv_heads) if divide else 1


def held_limit(ranks: int, groups: int) -> float:
    """Return the largest part of its KV memory that requests may hold on each rank as the attention changes,
    between 0 and 1: f * (1 + (P - 1) / G) <= 1, since units of both layouts are held meanwhile."""
    return groups / (groups + ranks - 1)


KV_ROUND_PAGES = 256
"""Pages that a rank announces at once, to be copied ahead of a switch of attention, so that no step waits
long. The next ones follow once these have been read.
"""
KV_PAGE_SECONDS = 1e-5
"""Bookkeeping for each page in the step that switches, of Roost's own engine (docs/measurements.md)."""


def kv_units_read(pages: Sequence[int], after: AttentionKind, ranks: int, groups: int) -> IntArray:
    """Return the KV units that each rank reads from others as the attention changes: int64 [ranks].

    A unit is a page of one head group. after: the attention to come. pages: used pages of each target before:
    of each rank for tp, of the engine for dp. To tp, a rank reads its group of every page that another rank
    has. To dp, each rank gets an even share of the pages, and reads the groups that it lacks. Pages that are
    merged to tp, or copied to several ranks to dp, are not known here, and are not counted.
    """
    total = sum(pages)
    if after == "tp":
        return total - np.asarray(pages, np.int64)
    shares = np.full(ranks, total // ranks, np.int64)
    shares[: total % ranks] += 1
    return shares * (groups - 1)
