"""Layouts: the distribution of attention and experts over the ranks of one engine."""

from typing import Literal

import msgspec

from fleet.experts import ModelShape


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """`(attention, boundary)`: experts are sharded in the layers below `boundary` and whole in the layers
    from it on.

    EP = (dp, 0), EXPERTS_TP = (dp, N), TP = (tp, N), TP_EP = (tp, 0) for N MoE layers. Every (dp, h) can be
    served; (tp, h) with 0 < h < N is refused.
    """

    attention: Literal["dp", "tp"]
    boundary: int

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError when a model of this shape cannot be served in this layout."""
        if not 0 <= self.boundary <= shape.layers:
            raise ValueError(
                f"layout: boundary {self.boundary} is outside 0..{shape.layers} (the model's MoE layers)"
            )
        if self.attention == "tp" and 0 < self.boundary < shape.layers:
            raise ValueError(
                "layout: tensor-parallel attention needs the experts of every layer sharded, boundary"
                f" {shape.layers}, or of none, boundary 0, not {self.boundary}"
            )

    @property
    def targets_are_ranks(self) -> bool:
        """True if each rank owns its requests (data-parallel attention). False: the engine is a single
        target.
        """
        return self.attention == "dp"


EP = Layout(attention="dp", boundary=0)
"""Expert parallelism: data-parallel attention, whole experts distributed over the ranks."""
TP_EP = Layout(attention="tp", boundary=0)
"""Tensor-parallel attention, whole experts distributed over the ranks: vLLM's `--tensor-parallel-size` with
`--enable-expert-parallel`. The engine is one target, and no rank is nearer to a request than another.
"""
