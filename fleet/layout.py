"""Layouts: the distribution of attention and experts over the ranks of one engine, layer by layer."""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`(attention, sharded)`: the experts of a *sharded* layer are cut, and every rank holds a part of each;
    a layer that is not sharded is *whole*, and every expert lies with some ranks.

    EP = (dp, none), EXPERTS_TP = (dp, all), TP = (tp, all), TP_EP = (tp, none). Every (dp, any layers) can be
    served; (tp, some layers) is refused.
    """

    attention: Literal["dp", "tp"]
    sharded: tuple[int, ...] = ()
    """MoE layers whose experts are sharded, ascending"""
    boundary: Literal[0] = 0
    """What records of earlier releases say: layers below it were sharded. No engine ever had such layers, so
    another value is refused"""

    def __post_init__(self) -> None:
        if any(layer < 0 for layer in self.sharded) or any(
            second <= first for first, second in zip(self.sharded, self.sharded[1:], strict=False)
        ):
            raise ValueError(
                f"layout: sharded layers must be numbers from 0 on, ascending, each once; not"
                f" {list(self.sharded)}"
            )

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError when a model of this shape cannot be served in this layout."""
        if self.sharded and self.sharded[-1] >= shape.layers:
            raise ValueError(
                f"layout: sharded layer {self.sharded[-1]} is not one of the model's {shape.layers} MoE"
                " layers, which are numbered from 0"
            )
        if self.attention == "tp" and 0 < len(self.sharded) < shape.layers:
            raise ValueError(
                "layout: tensor-parallel attention needs the experts of every layer sharded, or of none; not"
                f" of {len(self.sharded)} of {shape.layers}"
            )

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
        experts = f"layers {_ranges(self.sharded)} sharded" if self.sharded else "experts whole"
        return f"{self.attention}, {experts}"


EP = Layout(attention="dp")
"""Expert parallelism: data-parallel attention, whole experts distributed over the ranks."""
TP_EP = Layout(attention="tp")
"""Tensor-parallel attention, whole experts distributed over the ranks: vLLM's `--tensor-parallel-size` with
`--enable-expert-parallel`. The engine is one target, and no rank is nearer to a request than another.
"""


def experts_tp(layers: int) -> Layout:
    """Return EXPERTS_TP: data-parallel attention, the experts of all MoE layers sharded."""
    return Layout(attention="dp", sharded=tuple(range(layers)))


def tp(layers: int) -> Layout:
    """Return TP: attention and the experts of all MoE layers sharded."""
    return Layout(attention="tp", sharded=tuple(range(layers)))


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return ascending numbers as text, runs shortened: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
