"""Inner loops of solvers and prices, compiled from C. Pure: arrays in, arrays out.

Every loop exists twice: here in C, and as numpy code beside its caller. The numpy form is the oracle of the
tests, and serves where no library was built (`hatch_build.py`; there was no C compiler). Both give the same
bits: the C code adds in the order in which numpy adds. The reasons: docs/decisions/0023-compiled-solvers.md.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, FloatingArray, IndexArray, IntArray
from fleet.compiled import CompiledForm


class Kernels(Protocol):
    """The library. Arrays are contiguous and of the type stated; `out` arrays are written.

    Each kernel raises ValueError for an array of another type, for lengths that contradict each other, and
    for an index out of range.
    """

    SOURCE: str
    """Digest of the C sources that the library was compiled from."""

    def flow(
        self,
        rank: IndexArray,
        group: IndexArray,
        alone: FloatArray,
        groups: int,
        served: FloatArray,
        own: FloatArray | None,
        rounds: int,
        enough: float,
        out: FloatArray,
    ) -> None:
        """`migration.solvers.split_weights.diffused`."""

    def overflow_view(self, *arrays: NDArray[Any]) -> None:
        """`migration.solvers.overflow_state.overflow_view`: the state's arrays, then those of the view."""

    def overflow_admit(self, row: IndexArray, expert: IndexArray, *arrays: NDArray[Any]) -> None:
        """`migration.solvers.overflow_state.admit`: then arrays of the state; the last five change."""

    def overflow_promises(
        self,
        row: IndexArray,
        expert: IndexArray,
        worth: FloatArray | None,
        flow: FloatArray | None,
        *arrays: Any,
    ) -> None:
        """`migration.solvers.overflow_copies._promises`; with `flow`, those of `_lane_promises`."""

    def swap_replicated(self, expert: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.swap_search._replicated`."""

    def swap_spare(self, dealing: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.swap_search._spare_slots`."""

    def swap_exchange(self, layer: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.swap_search._swap`: the best pair of slots for each rank."""

    def swap_copy(self, slots: int, *arguments: Any) -> None:
        """`migration.solvers.swap_search._one_copy`: the best pairs for each rank."""

    def locality_filled(self, own: FloatArray, *arguments: Any) -> None:
        """`migration.solvers.holder_value.filled`."""

    def locality_one_each(self, own: FloatArray, *arguments: Any) -> None:
        """`migration.solvers.holder_value._one_each`; the last array is False if the experts do not fit."""

    def locality_exchanged(self, own: FloatingArray, *arguments: Any) -> None:
        """`migration.solvers.pairwise_exchange.exchange_experts`, in single precision; `held` changes."""

    def cap_levelled(self, rank: IndexArray, *arguments: Any) -> None:
        """The rounds of `migration.solvers.load_cap.level`; near and far change."""

    def cap_stepped(self, rows: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.load_cap._stepped`; the state of the layers changes."""

    def ordered_series(self, table: NDArray[np.int16], *arguments: Any) -> None:
        """`migration.solvers.ordered_diff._series`: the last three arrays are written."""

    def priced_traffic(self, table: NDArray[np.int16], *arguments: Any) -> None:
        """`migration.model.cost_model._dispatched`: the last eight arrays are written."""

    def transported(self, cost: FloatArray, order: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.transportation.transported`: the last array, of zeros, is written."""

    def spread_sets(self, sets: NDArray[np.int16], shared: FloatArray, *arguments: Any) -> None:
        """`migration.solvers.full_placement._nodes_of`: the last array is written."""

    def placement_traded(self, expert: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.full_placement._traded`: the first four arrays change."""

    def tokens_destinations(self, held: BoolArray, experts: IntArray, *arguments: Any) -> None:
        """`migration.model.sampled_traffic.destinations`: the last two arrays are written."""

    def tokens_exchanged(self, held: BoolArray, experts: IntArray, *arguments: Any) -> None:
        """`migration.solvers.token_swaps._searched`: the first array changes, the last two are written."""

    def overflow_tried(self, row: IndexArray, *arguments: Any) -> None:
        """`migration.solvers.overflow_copies._tried`."""


_form: CompiledForm[Kernels] = CompiledForm(__name__)
compiled, python_form, missing = _form.library, _form.python_form, _form.missing


def plain(values: NDArray[Any]) -> NDArray[Any]:
    """Return the array, contiguous."""
    return values if values.flags.c_contiguous else values.copy()
