"""Safe reader for files of `torch.save`, without torch: tensors become numpy arrays. Pure, over bytes.

The file is a zip archive: `<name>/data.pkl` pickles the object, `<name>/data/<key>` holds the bytes of each
storage, little endian unless `<name>/byteorder` says otherwise (torch.serialization, format of torch 1.6 and
later). A pickle may call any function that it can name. This reader admits only the constructors of tensors
and ordered dicts, and replaces them by functions of this module. Devices do not matter: a tensor saved from a
GPU is readable too.
"""

import io
import pickle
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"PK\x03\x04"
MAX_PICKLE_BYTES = 256 * 1024 * 1024
"""Limit for the pickled structure, without the tensors."""
_STORAGES = {
    "BoolStorage": "?",
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
    "HalfStorage": "f2",
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
}


def read_torch_file(content: bytes) -> Any:
    """Return the saved object, with tensors as read-only arrays.

    ValueError for damaged files, and for content other than numbers, text, lists and dicts.
    """
    if not content.startswith(MAGIC):
        raise ValueError("not written by torch.save of torch 1.6 or later (such a file is a zip archive)")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read(archive, len(content))
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ValueError(f"damaged, or no file of tensors: {error}") from error
    except NotImplementedError as error:
        raise ValueError(f"compressed or encrypted, which torch.save never does: {error}") from error


def _read(archive: zipfile.ZipFile, size: int) -> Any:
    stems = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(stems) != 1:
        raise ValueError(f"{len(stems)} entries are named data.pkl; expected one")
    for entry in archive.infolist():
        # Uncompressed entries cannot expand on reading.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise ValueError(f"entry {entry.filename!r} is compressed, which torch.save never does")
    pickled = archive.getinfo(f"{stems[0]}/data.pkl")
    if pickled.file_size > MAX_PICKLE_BYTES:
        raise ValueError(
            f"its structure takes {pickled.file_size} bytes; at most {MAX_PICKLE_BYTES} are read"
        )
    order = (
        archive.read(f"{stems[0]}/byteorder") if f"{stems[0]}/byteorder" in archive.namelist() else b"little"
    )
    return _Reader(archive, stems[0], ">" if order == b"big" else "<", pickled).load()


class _Reader(pickle.Unpickler):
    """Unpickler that can call only `_tensor` and `dict`."""

    def __init__(self, archive: zipfile.ZipFile, stem: str, order: str, pickled: zipfile.ZipInfo) -> None:
        super().__init__(io.BytesIO(archive.read(pickled)))
        self._archive = archive
        self._stem = stem
        self._order = order

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return _no_hooks
        if module == "torch" and name in _STORAGES:
            return _Kind(_STORAGES[name])
        raise pickle.UnpicklingError(
            f"it names {module}.{name}; only numbers, text, lists, dicts and tensors of plain numbers are"
            " read"
        )

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        """Return a storage: ("storage", kind, key, device, elements)."""
        word, kind, key, _, elements = pid
        if word != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it refers to {word!r}; expected a storage of plain numbers")
        values = np.frombuffer(
            self._archive.read(f"{self._stem}/data/{key}"), np.dtype(self._order + kind.code)
        )
        if len(values) != elements:
            raise ValueError(f"storage {key!r} has {len(values)} numbers; {elements} are named")
        return values


class _Kind:
    """Placeholder for one of torch's storage classes."""

    def __init__(self, code: str) -> None:
        self.code = code

    __setstate__ = None
    """nothing in the file may change it"""


def _no_hooks() -> dict[str, Any]:
    """Replace an ordered dict: a tensor's backward hooks, which are not read."""
    return {}


def _tensor(
    storage: NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """Return the array that a tensor views in its storage. ValueError if it exceeds the storage."""
    if not isinstance(storage, np.ndarray) or storage.ndim != 1:
        raise ValueError("a tensor without a storage")
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a tensor at {offset} of shape {shape} and strides {strides}")
    if 0 in shape:
        return np.zeros(shape, storage.dtype)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if last >= len(storage):
        raise ValueError(f"a tensor of shape {shape} reaches to {last} in a storage of {len(storage)}")
    width = storage.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, tuple(width * stride for stride in strides), writeable=False
    )
    if view.size > len(storage):
        raise ValueError(f"a tensor of shape {shape} is larger than its storage of {len(storage)}")
    return view
