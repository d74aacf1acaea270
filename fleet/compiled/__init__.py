"""The compiled library of a package that also has a Python form of it.

A package `kernels` holds C sources, and beside them the extension module `_compiled` once `hatch_build.py`
has built it. Without it, or where it was built from other sources, the callers' Python form serves.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, resources
from typing import Any, Generic, TypeVar, cast

KernelsT = TypeVar("KernelsT")


class CompiledForm(Generic[KernelsT]):
    """The library of one package, or the reason why there is none."""

    def __init__(self, package: str) -> None:
        library, self.missing = _loaded(package)
        """missing: the reason why the Python form serves; empty if the compiled form does."""
        self._serving = cast("KernelsT | None", library)

    def library(self) -> KernelsT | None:
        """Return the library. None: the Python form serves."""
        return self._serving

    @contextmanager
    def python_form(self) -> Iterator[None]:
        """Let the Python form serve meanwhile, in all threads: the other side of tests and benchmarks."""
        before, self._serving = self._serving, None
        try:
            yield
        finally:
            self._serving = before


def _loaded(package: str) -> tuple[Any, str]:
    """Return (the library, ""), or (None, the reason why there is none)."""
    try:
        library = import_module(f"{package}._compiled")
    except ImportError as error:
        return None, f"there is no compiled library ({error})"
    # A source tree may have changed since its library was built. A wheel carries no sources.
    files = sorted(resources.files(package).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".c", ".h"))]
    if sources and hashlib.sha256(b"".join(sources)).hexdigest()[:16] != library.SOURCE:
        return None, "the compiled library is of other sources; run: make kernels"
    return library, ""
