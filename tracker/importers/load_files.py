"""Expert loads in files of other systems, as counts [layers, experts]. Pure parsers over bytes; the input is
not trusted.

SGLang's expert distribution recorder (`/dump_expert_distribution_record`, a `.pt` file), by its mode:
- `stat`, `stat_approx`: {rank, logical_count: int32 [steps, layers, experts], ...}, all ranks together;
- `per_pass`: {records: [{forward_pass_id, rank, global_physical_count: [layers, slots]}],
  last_physical_to_logical_map: [layers, slots]}, of one rank;
- `per_token`: the same, and each record has topk_ids_of_layer: int32 [layers, tokens, k], physical, -1 for no
  expert.

Load matrices in EPLB's format: [layers, experts] or [steps, layers, experts] in `.npy`, `.npz`, `.json` or
`.csv`. In `.npz` and `.json` the matrix has one of LOAD_NAMES, with a `physical_to_logical_map` beside it if
the columns are physical slots.

These systems number all layers of a model, with zeros for dense ones. Roost numbers only layers with experts,
so layers without any activation are left out.
"""

import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import AnyArray
from fleet.routings import read_npy
from tracker.importers.torch_files import MAGIC, read_torch_file

LOAD_NAMES = (
    "logical_count",
    "weight",
    "expert_load",
    "load",
    "counts",
    "physical_count",
    "global_physical_count",
)
"""Names of load matrices, in order of preference."""
MAP_NAMES = ("physical_to_logical_map", "last_physical_to_logical_map")
MAX_BYTES = 1 << 30
MAX_CELLS = 1 << 27
"""limit of numbers in one array"""
SUFFIXES = (".pt", ".npy", ".npz", ".json", ".csv")


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """Load of each expert. counts: float64 [layers, experts], without layers that have no experts.

    form: description of the input, for display. is_counts: the values are counts of (token, k) pairs;
    otherwise only their proportions are meaningful. top_k: experts per token, if the file has it.
    empty_layers: layers left out.
    """

    counts: NDArray[np.float64]
    form: str
    is_counts: bool
    steps: int = 1
    top_k: int | None = None
    empty_layers: int = 0

    @property
    def layers(self) -> int:
        return int(self.counts.shape[0])

    @property
    def experts(self) -> int:
        return int(self.counts.shape[1])

    def pairs(self, top_k: int, tokens: int | None = None) -> tuple[int, NDArray[np.int64]]:
        """Return tokens and integer counts [layers, experts] of (token, k) pairs.

        tokens: number of tokens that proportions represent; counts need none. ValueError if neither gives it.
        """
        if not self.is_counts and tokens is None:
            raise ValueError(f"{self.form} holds proportions, not counts; say how many tokens they stand for")
        if tokens is None:
            return max(1, round(float(self.counts.sum(axis=1).max()) / top_k)), self.counts.astype(np.int64)
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        return tokens, np.rint(shares * tokens * top_k).astype(np.int64)


def read_load(name: str, content: bytes) -> ExpertLoads:
    """Read the load in a file, by the extension of its name. ValueError gives the actual and the expected
    content.
    """
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"{name}: a name that ends in {', '.join(SUFFIXES)} is expected")
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"{name}: {len(content)} bytes; at most {MAX_BYTES} are read. Dump shorter recordings"
        )
    try:
        return _READERS[suffix](content)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _recorded(content: bytes) -> ExpertLoads:
    """Read a dump of SGLang's recorder."""
    found = read_torch_file(content)
    if isinstance(found, np.ndarray):
        return _load(found, None, "a tensor")
    if isinstance(found, dict):
        return (
            _passes(found["records"], _map_in(found))
            if isinstance(found.get("records"), list)
            else _named(found, "an SGLang recording")
        )
    raise ValueError(f"a {type(found).__name__} was saved; expected a recorder's dict")


def _passes(records: list[Any], mapping: AnyArray | None) -> ExpertLoads:
    """Sum records of forward passes, of modes `per_pass` and `per_token`."""
    if not records:
        raise ValueError("a recording without any forward pass; start the recorder before the traffic")
    total: NDArray[np.float64] | None = None
    top_k: int | None = None
    for number, record in enumerate(records):
        if not isinstance(record, dict) or "global_physical_count" not in record:
            raise ValueError(f"record {number} has no global_physical_count")
        counts = _numbers(record["global_physical_count"], f"global_physical_count of record {number}")
        if counts.ndim != 2 or (total is not None and counts.shape != total.shape):
            raise ValueError(
                f"global_physical_count of record {number} has shape {counts.shape}; expected one [layers,"
                " slots] for all"
            )
        total = counts if total is None else total + counts
        if "topk_ids_of_layer" in record:
            top_k = max(top_k or 1, _top_k(record["topk_ids_of_layer"]))
    assert total is not None
    mode = "per_pass" if top_k is None else "per_token"
    load = _load(total, mapping, f"an SGLang recording of mode {mode}")
    return ExpertLoads(load.counts, load.form, load.is_counts, len(records), top_k, load.empty_layers)


def _top_k(chosen: Any) -> int:
    """Return the experts per token in [layers, tokens, k] ids, -1 for no expert."""
    ids = np.asarray(chosen)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"topk_ids_of_layer has shape {ids.shape} of {ids.dtype}; expected integers [layers, tokens, k]"
        )
    return int((ids >= 0).sum(axis=2).max(initial=1))


def _matrix(content: bytes) -> ExpertLoads:
    return _load(_npy(content), None, "a matrix")


def _archive(content: bytes) -> ExpertLoads:
    arrays: dict[str, AnyArray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if name in (*LOAD_NAMES, *MAP_NAMES) or len(archive.infolist()) == 1:
                    if entry.file_size > MAX_BYTES:
                        raise ValueError(
                            f"array {name!r} takes {entry.file_size} bytes; at most {MAX_BYTES} are read"
                        )
                    arrays[name] = _npy(archive.read(entry))
            if not arrays:
                _nothing_found(entry.filename.removesuffix(".npy") for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"not a .npz archive ({error})") from error
    if len(arrays) == 1 and not set(arrays) & set(LOAD_NAMES):
        return _load(next(iter(arrays.values())), None, "a matrix")
    return _named(arrays, "a matrix")


def _npy(content: bytes) -> AnyArray:
    try:
        return read_npy(content)
    except ValueError as error:
        remedy = "; it is an archive, name it .npz" if content.startswith(MAGIC) else ""
        raise ValueError(f"not a .npy array of numbers ({error}){remedy}") from error


def _text(content: bytes) -> ExpertLoads:
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    return (
        _named(found, "a matrix")
        if isinstance(found, dict)
        else _load(_nested(found, "the list"), None, "a matrix")
    )


def _rows(content: bytes) -> ExpertLoads:
    """Read one line per layer, one column per expert, after an optional header; a first column named `layer`
    is ignored.
    """
    try:
        lines = [line for line in content.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"not text ({error})") from error
    if not lines:
        raise ValueError("an empty file; expected one line per layer")
    cells = [line.replace(";", ",").replace("\t", ",").split(",") for line in lines]
    has_head = not _is_number(cells[0][-1])
    skipped = 1 if has_head and cells[0][0].strip().strip('"').lower() == "layer" else 0
    rows = [row[skipped:] for row in cells[has_head:]]
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]) or not all(_is_number(cell) for cell in row):
            raise ValueError(
                f"line {number + 1 + has_head} has {len(row)} columns; expected {len(rows[0])} numbers in"
                " each"
            )
    return _load(np.array([[float(cell) for cell in row] for row in rows]), None, "a matrix")


_READERS = {".pt": _recorded, ".npy": _matrix, ".npz": _archive, ".json": _text, ".csv": _rows}


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _named(found: Mapping[str, Any], form: str) -> ExpertLoads:
    """Return the load matrix among named arrays."""
    name = next((name for name in LOAD_NAMES if name in found), "")
    if not name:
        _nothing_found(found)
    mapping = None if name == "logical_count" else _map_in(found)
    return _load(_nested(found[name], name), mapping, f"{form} named {name}")


def _nothing_found(names: Iterable[Any]) -> NoReturn:
    raise ValueError(
        f"it names {', '.join(sorted(str(name) for name in names)[:12]) or 'nothing'}; expected one of"
        f" {', '.join(LOAD_NAMES)}"
    )


def _map_in(found: Mapping[str, Any]) -> AnyArray | None:
    name = next((name for name in MAP_NAMES if found.get(name) is not None), None)
    return None if name is None else _nested(found[name], name)


def _nested(found: Any, name: str) -> AnyArray:
    """Convert nested lists to an array."""
    if isinstance(found, np.ndarray):
        return found
    try:
        table = np.array(found)
    except ValueError as error:
        raise ValueError(f"{name} is no table: its rows differ in length") from error
    if table.dtype.kind not in "iuf":
        raise ValueError(
            f"{name} holds {'text' if table.dtype.kind in 'US' else 'something else than numbers'}; expected"
            " a table of numbers"
        )
    return table


def _numbers(found: Any, name: str) -> NDArray[np.float64]:
    table = _nested(found, name)
    if table.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds {table.dtype}; expected numbers")
    if table.size > MAX_CELLS:
        raise ValueError(f"{name} holds {table.size} numbers; at most {MAX_CELLS} are read")
    wide = table.astype(np.float64)
    if not np.isfinite(wide).all() or (wide < 0).any():
        raise ValueError(
            f"{name} has values that are negative or not finite; loads are counts or shares >= 0"
        )
    return wide


def _load(table: AnyArray, mapping: AnyArray | None, form: str) -> ExpertLoads:
    """Return counts by logical expert, summed over steps, without layers that have no activation."""
    wide = _numbers(table, form)
    if wide.ndim not in (2, 3) or 0 in wide.shape:
        raise ValueError(
            f"{form} has shape {wide.shape}; expected [layers, experts] or [steps, layers, experts]"
        )
    steps = wide.shape[0] if wide.ndim == 3 else 1
    summed = wide.sum(axis=0) if wide.ndim == 3 else wide
    logical = summed if mapping is None else by_logical_expert(summed, mapping)
    used = logical.sum(axis=1) > 0
    if not used.any():
        raise ValueError(f"{form} of shape {wide.shape} is all zeros: nothing was recorded")
    kept = logical[used]
    return ExpertLoads(kept, form, bool((kept == np.rint(kept)).all()), steps, None, int((~used).sum()))


def by_logical_expert(counts: NDArray[np.float64], mapping: AnyArray) -> NDArray[np.float64]:
    """Sum counts [layers, slots] over an expert's replicas: float64 [layers, experts].

    mapping: [layers, slots], -1: an empty slot.
    """
    if mapping.shape != counts.shape or mapping.dtype.kind not in "iu":
        raise ValueError(
            f"physical_to_logical_map has shape {mapping.shape} of {mapping.dtype}; expected integers of the"
            f" counts' shape {counts.shape}"
        )
    most = int(mapping.max())
    if mapping.min() < -1 or most < 0 or most >= counts.shape[1]:
        raise ValueError(
            f"physical_to_logical_map runs from {mapping.min()} to {most}; expected -1 to"
            f" {counts.shape[1] - 1}"
        )
    logical = np.zeros((len(counts), most + 1))
    layers, slots = np.nonzero(mapping >= 0)
    np.add.at(logical, (layers, mapping[layers, slots]), counts[layers, slots])
    return logical
