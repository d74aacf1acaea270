"""Loops of a decoder layer in C, over rows of fp32 values (docs/decisions/0025-compiled-layers.md).

Callers (`row_operations` and the rooms above) have a torch form of each loop, which is its oracle in tests
and serves where no library was built. Every row is computed alone, so its bits depend on no other row; those
of the torch form do unless products are padded (`dispatch.least_rows`).

Arguments are numbers: addresses of arrays, strides and counts in values. The C sources say which.
"""

from typing import Protocol

from fleet.compiled import CompiledForm


class LayerLoops(Protocol):
    """The compiled library. Arrays are contiguous, except where a stride follows them."""

    SOURCE: str

    def product(self, *numbers: int) -> None:
        """`row_operations.product`."""

    def grouped(self, *numbers: int) -> None:
        """`moe.GroupedMatrices.product`."""

    def norm(self, *numbers: float) -> None:
        """`row_operations.rms_norm`."""

    def gated(self, *numbers: int) -> None:
        """`row_operations.swiglu`."""

    def route(self, *numbers: int) -> None:
        """`moe.route`, behind its product."""

    def weighted(self, *numbers: int) -> None:
        """`row_operations.weighted_sum`."""

    def attend(self, *numbers: float) -> None:
        """`attention.Attention.forward`, between its products."""

    def group(self, *numbers: int) -> int:
        """`dispatch.group_by_slot`. Returns the number of rows."""
        ...

    def kinds(self) -> list[str]:
        """Names of the kinds of vectors that this processor has loops for, the fastest first."""
        ...

    def use(self, number: int) -> None:
        """Compute with this one of the kinds. The first one serves by default. For tests."""


_form: CompiledForm[LayerLoops] = CompiledForm(__name__)
compiled, torch_form, missing = _form.library, _form.python_form, _form.missing
