"""What the C library does with memory that a step gives back: it keeps it for the next step."""

import ctypes

KEPT_BYTES = 128 << 20
"""Freed bytes the process keeps rather than returning them to the system; a step of a few hundred tokens uses some tens of MB."""
_LARGEST_BYTES = 32 << 20
"""Blocks up to this size come from the kept memory; glibc accepts no more."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Stop glibc from returning a step's temporaries to the system after every step; False where the C library has no such setting.

    By default it does, and every page is then faulted in and zeroed anew: 20 of 48 ms for 512 tokens of the demo model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
