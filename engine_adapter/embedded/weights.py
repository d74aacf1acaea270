"""Identity of an engine's weights: a digest of its checkpoint and of the settings that affect results."""

import mmap
from collections.abc import Iterable
from pathlib import Path

import xxhash

_PIECE = 64 * 1024 * 1024
"""Bytes hashed at a time. The GIL is released meanwhile."""


def weights_digest(files: Iterable[Path], settings: str) -> str:
    """Return the xxh3-128 digest (32 hexadecimal digits) of whole safetensors files, ordered by name, and of
    the settings that change the results.

    settings: the config's values, the compute dtype, and the quantization. All bytes of the files count, so
    an edited tensor gives another digest. Equal weights in other shards also give another digest. That only
    costs a continuation and never confuses two models. The digest distinguishes checkpoints. It does not
    protect against a malicious author of checkpoints. OSError when a file cannot be read.
    """
    digest = xxhash.xxh3_128(settings.encode())
    for path in sorted(files, key=lambda path: path.name):
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            digest.update(len(path.name).to_bytes(8) + path.name.encode() + len(view).to_bytes(8))
            for start in range(0, len(view), _PIECE):
                with view[start : start + _PIECE] as piece:
                    digest.update(piece)
    return digest.hexdigest()
