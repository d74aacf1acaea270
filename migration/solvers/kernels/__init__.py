"""Inner loops of the solvers, compiled from C. Pure: arrays in, arrays out.

Every loop exists twice: here in C, and as numpy code beside its caller. The numpy form is the oracle of the
tests, and serves where no library was built (`hatch_build.py`; there was no C compiler). Both give the same
bits: the C code adds in the order in which numpy adds. The reasons: docs/decisions/0023-compiled-solvers.md.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, resources
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from fleet.arrays import FloatArray, IndexArray


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


def _loaded() -> tuple[Kernels | None, str]:
    """Return (the library, ""), or (None, the reason why there is none)."""
    try:
        library = cast(Kernels, import_module(f"{__name__}._compiled"))
    except ImportError as error:
        return None, f"there is no compiled library ({error})"
    # A source tree may have changed since its library was built. A wheel carries no sources.
    files = sorted(resources.files(__name__).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".c", ".h"))]
    if sources and hashlib.sha256(b"".join(sources)).hexdigest()[:16] != library.SOURCE:
        return None, "the compiled library is of other sources; run: make kernels"
    return library, ""


_library, missing = _loaded()
"""missing: the reason why the Python form serves; empty if the compiled form does."""
_serving = _library


def compiled() -> Kernels | None:
    """Return the library. None: the Python form serves."""
    return _serving


@contextmanager
def python_form() -> Iterator[None]:
    """Let the Python form serve meanwhile, in all threads: the other side of tests and benchmarks."""
    global _serving
    before, _serving = _serving, None
    try:
        yield
    finally:
        _serving = before


def plain(values: NDArray[Any]) -> NDArray[Any]:
    """Return the array, contiguous."""
    return values if values.flags.c_contiguous else values.copy()
