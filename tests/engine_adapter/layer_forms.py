"""Forms that compute a layer: torch, and compiled loops for each kind of vectors that this processor has."""

import contextlib
from collections.abc import Iterator

from engine_adapter.embedded import kernels

TORCH = "torch"
_LIBRARY = kernels.compiled()
KINDS = [] if _LIBRARY is None else _LIBRARY.kinds()
FORMS = [TORCH, *KINDS]


@contextlib.contextmanager
def computed_by(form: str) -> Iterator[None]:
    """Let one of the forms compute while the context lasts. Runners made in it are to be used in it."""
    if form == TORCH:
        with kernels.torch_form():
            yield
        return
    assert _LIBRARY is not None
    _LIBRARY.use(KINDS.index(form))
    try:
        yield
    finally:
        _LIBRARY.use(0)
