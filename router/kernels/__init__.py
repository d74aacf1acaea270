"""Inner loops of routing decisions and of streams, compiled from C. Pure.

Every loop exists twice: here in C, and as Python code beside its caller. The Python form is the oracle of the
tests, and serves where no library was built (`hatch_build.py`; there was no C compiler). Both give equal
bits. The reasons: docs/decisions/0026-compiled-decisions.md.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from fleet.arrays import Float32Array, FloatArray, IndexArray, IntArray, KeyArray
from fleet.compiled import CompiledForm

Hashes: TypeAlias = "array[int]"
"""u64 sequence hashes of the leading blocks of a prompt"""


SALT = hash("places of blocks") % (1 << 64)
"""Differs from process to process."""


class BlockMasks(Protocol):
    """Masks of the ranks that hold each block (`router.prefix_index.block_masks.MasksInPython`). A block
    without holders has none.
    """

    def grant(self, blocks: Sequence[int], bit: int, old: Any, live: int, shared: dict[int, int]) -> int:
        """Add a rank's bit to the masks of blocks. Return how many lacked it. old: the masks that are swept
        into these; live: bits that are valid; shared: one object for equal masks. OverflowError for a block
        outside u64.
        """

    def withdraw(self, blocks: Sequence[int], bit: int, old: Any, shared: dict[int, int]) -> list[int]:
        """Remove a rank's bit from the masks of blocks. Return those that had it."""

    def sweep(self, count: int, live: int, into: Any, shared: dict[int, int]) -> list[int]:
        """Move at most `count` blocks to other masks, with their valid bits. Return those without any: they
        are removed.
        """

    def get(self, block: int, /) -> int | None: ...

    def __contains__(self, block: object) -> bool: ...

    def __len__(self) -> int: ...


class RecentBlocks(Protocol):
    """Sequence hashes of blocks in the order of their last use
    (`router.prefix_index.approximate_index.RecentBlocksInPython`).
    """

    def touch(self, blocks: Hashes, most: int) -> list[int]:
        """Use the first `most` blocks of a prompt, from the last to the first. Return those that are new, in
        this order.
        """

    def evict(self, count: int) -> list[int]:
        """Remove as many blocks, and return them: the least recently used, in this order."""

    def __len__(self) -> int: ...


class DecisionKernels(Protocol):
    """The library."""

    SOURCE: str
    """Digest of the C sources that the library was compiled from."""

    def chain(self, prompt: "list[int] | bytes", size: int, seed: int, chained: Hashes, depth: int) -> bytes:
        """`router.prefix_index.block_hash_chain.BlockHashChain.reach`: u64 hashes of blocks of `size` tokens.

        prompt: ids, or bytes, four a token. chained: hashes that are known. OverflowError for an id outside
        u32, ValueError beyond the end.
        """

    def longest_known(
        self,
        prompt: "list[int] | bytes",
        size: int,
        seed: int,
        chained: Hashes,
        keys: KeyArray,
        rows: memoryview,
        ways: int,
        stride: int,
        width: int,
        guess: int,
        widest: int,
    ) -> tuple[bytes, int, bytes | None]:
        """`fleet.prediction.longest_known` in a table as of `keyed_row`: the hashes known afterwards, the
        number of leading blocks that are known, and the row of the last of them.
        """

    TERMS: tuple[str, ...]
    """Names of the terms of `price`, in order."""

    def price(
        self,
        targets: int,
        engines: int,
        prompt: float,
        output: float,
        gain: float,
        pairs: bool,
        far: bool,
        reads: bool,
        gathers: bool,
        apart: bool,
        speeds: FloatArray,
        *arrays: Any,
    ) -> None:
        """`router.scheduling.cost.score`: `TargetTable.speeds`, and which of its columns count; load,
        uncached, first targets of engines, factors, expert load, switch delay, transfer, weights, and the
        result, [TERMS + 2, targets]. ValueError for an array of another type or length.
        """

    def pool(
        self,
        clusters: int,
        ids: list[int],
        first: int,
        last: int,
        weight: float,
        rows: int,
        patterns: int,
        *arrays: Float32Array | bytes | None,
    ) -> tuple[float, ...]:
        """`fleet.prediction.predict`, from the rows of a request's keys on. Returns the evidence by source.

        Arrays: the table of tokens [rows, K], of which those of the ids `first` to `last` (exclusive) count
        `weight` each; log-shares and shares [K]; weights of the sources [patterns, sources]; the rows of
        prefix, session and tenant, bytes or None; the result [K].
        """

    def keyed_row(
        self, key: int, keys: KeyArray, rows: memoryview, ways: int, stride: int, width: int
    ) -> bytes | None:
        """`fleet.keyed.KeyedTable.get`: keys [slots], rows of `stride` bytes, of which `width` count."""

    def walk(
        self,
        prompt: "list[int] | bytes",
        size: int,
        seed: int,
        chained: Hashes,
        masks: "BlockMasks",
        old: "BlockMasks",
        held: int,
        gappy: int,
        widest: int,
        slots: int,
        targets: int,
        of: IndexArray,
        out: IntArray,
    ) -> tuple[bytes, int]:
        """`router.prefix_index.block_index.ends_of`: the hashes known afterwards, and the most leading blocks
        of a target. Writes the leading blocks of each target, whose slots are `of`, into out, int64
        [targets].
        """

    BlockMasks: Callable[[int], BlockMasks]
    RecentBlocks: Callable[[int], RecentBlocks]
    """Their argument is a secret number (`SALT`): without it no client can choose blocks that collide."""

    def maxima(self, rows: int, targets: int, table: IntArray) -> tuple[int, ...]:
        """Return the largest number of each row of int64 [rows, targets]. ValueError without targets."""

    def uncached(
        self, targets: int, prompt: int, overlap: IntArray, block_size: IntArray, out: IntArray
    ) -> None:
        """`router.scheduling.cost.uncached_tokens`, int64 [targets]."""

    def cheapest(
        self, targets: int, score: FloatArray, outstanding: FloatArray, same: float, seed: int
    ) -> tuple[int, int]:
        """`router.scheduling.policies._cheapest`: the chosen candidate and the number of tied ones."""

    def mixed(
        self,
        clusters: int,
        rows: int,
        prices: Float32Array,
        weights: Float32Array,
        targets: int,
        engine: IndexArray,
        out: FloatArray,
    ) -> None:
        """`router.fleet_state.engine_state.PriceList.of`: prices [clusters, rows], weights [clusters], out
        float64 [4, targets].
        """

    def whole_events(self, data: bytes) -> int:
        """`router.passthrough.event_relay.whole_events`."""


_form: CompiledForm[DecisionKernels] = CompiledForm(__name__)
compiled, python_form, missing = _form.library, _form.python_form, _form.missing
