"""The identity of what an engine computes with: a digest of its checkpoint and of how that is computed."""

import mmap
from collections.abc import Iterable
from pathlib import Path

import xxhash

_PIECE = 64 * 1024 * 1024
"""bytes hashed at a time; the interpreter is free for other threads meanwhile"""


def weights_digest(files: Iterable[Path], settings: str) -> str:
    """xxh3-128 (32 hexadecimal digits) of whole safetensors files, by name, and of the settings that change
    the numbers.

    settings: the config's values, the dtype that is computed in, the quantisation. All bytes of the files
    count: an edited tensor is another model. Equal weights in other shards are another digest too, which
    costs a continuation and never joins two models. It tells checkpoints apart; it is no proof against
    someone who writes them. OSError when a file cannot be read.
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
