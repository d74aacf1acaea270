"""KV page allocation with prefix sharing and reuse. Pure bookkeeping, no tensors.

A page is in exactly one of three states: *held* by one or more sequences, *kept* (held by none, but its block
is registered and a later prompt may share it) or *free*. Two more exist while other ranks copy pages: a page
is *reserved* for a copy of another rank's page, or *withheld*: it was evicted while another rank was reading
it. A block is registered under its chained sequence hash once all its tokens are computed. One hash has one
page: a sequence that computes a block that is already registered switches to the registered page. So the
holder of a registered page also holds all its ancestors. `close` releases a sequence's pages in reverse
order, so `kept` always has descendants before ancestors. Evicting from its front never orphans a block.

A 64-bit hash finds a page, but the content decides. A page is shared only if its block has the same tokens,
the same salt and the same parent, all the way from the start of the prompt. So a forged hash collision shares
nothing. A sequence that computes a block whose hash already names another block keeps that block and all
later ones private.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec

from fleet.blocks import BLOCK_SIZE, SEED, chain, contents, local_hash, salted_seed
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvRemoved, KvStored

Change = KvChange | Literal["cleared"]


class Block(msgspec.Struct, frozen=True, gc=False):
    """A full block of a sequence: its identity in KV events, its tokens (u32 little endian), and the salt of
    its request."""

    identity: KvBlock
    tokens: bytes
    salt: str = ""

    @property
    def block_hash(self) -> int:
        """u64 sequence hash."""
        return self.identity.block_hash


def identify(
    tokens: Sequence[int], block_size: int, salt: str = "", known: Sequence[Block] = ()
) -> list[Block]:
    """Return the full blocks of `tokens`, from the start of a prompt. salt: separates requests that must not
    share KV. All requests without a salt share "". known: the first blocks, which are not hashed again."""
    blocks = list(known)
    parent = known[-1].block_hash if known else None
    seed = salted_seed(salt)
    for content in contents(tokens[len(known) * block_size :], block_size):
        local = local_hash(content, seed)
        parent = chain(parent, local)
        blocks.append(Block(KvBlock(parent, local), content, salt))
    return blocks


def following(last: Block | None, tokens: Sequence[int], salt: str = "") -> Block:
    """Return the block of exactly these tokens after `last` (None: at the start), as `identify` would create
    it."""
    (content,) = contents(tokens, len(tokens))
    local = local_hash(content, salted_seed(salt) if salt else SEED)
    return Block(KvBlock(chain(None if last is None else last.block_hash, local), local), content, salt)


@dataclass(slots=True, eq=False)
class BlockTable:
    """Pages of one sequence in the order of its tokens. Only `KvCache` changes it."""

    pages: list[int] = field(default_factory=list)
    registered: int = 0
    """Number of leading pages that are registered under their block's hash."""
    collided: bool = False
    """True if the hash of the next block names another block. Then no further block of this sequence is
    registered."""


class RegisteredBlock(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A block that later prompts may share, its page, and the u64 sequence hash of the block before it."""

    page: int
    block: Block
    parent: int | None

    def holds(self, block: Block, parent: int | None) -> bool:
        """True if this is the same block with the same parent. The parent itself was compared before."""
        return self.block == block and self.parent == parent


class KvCache:
    """Pool of `pages` KV pages of `block_size` tokens each."""

    def __init__(self, pages: int, block_size: int = BLOCK_SIZE) -> None:
        if pages < 1 or block_size < 1:
            raise ValueError(f"KV cache: {pages} pages of {block_size} tokens; both must be at least 1")
        self.pages = pages
        self.block_size = block_size
        self._free = list(reversed(range(pages)))
        self._holders = [0] * pages
        self._kept: dict[int, None] = {}
        """Pages kept for reuse. Insertion order is eviction order."""
        self._by_hash: dict[int, RegisteredBlock] = {}
        """Registered blocks by sequence hash. Insertion order has parents before children."""
        self._block_of: dict[int, RegisteredBlock] = {}
        """Registered blocks by page."""
        self._reserved: dict[int, None] = {}
        self._pins: dict[int, int] = {}
        """Number of readers of each page that is read by other ranks."""
        self._withheld: set[int] = set()
        self._changes: list[Change] = []

    @classmethod
    def of(
        cls,
        pages: int,
        registered: Iterable[RegisteredBlock],
        kept: Iterable[int],
        tables: Iterable[BlockTable],
        block_size: int = BLOCK_SIZE,
        reserved: Iterable[int] = (),
    ) -> Self:
        """Create a cache that has these blocks, parents before children, and these open tables. Its first
        changes state it anew. kept: pages that no table holds, in order of eviction. reserved: as `reserve`
        would."""
        cache = cls(pages, block_size)
        cache._block_of = {entry.page: entry for entry in registered}
        cache._by_hash = {entry.block.block_hash: entry for entry in cache._block_of.values()}
        cache._kept = dict.fromkeys(kept)
        for table in tables:
            for page in table.pages:
                cache._holders[page] += 1
        cache._reserved = dict.fromkeys(reserved)
        cache._free = [
            page
            for page in reversed(range(pages))
            if not (cache._holders[page] or page in cache._kept or page in cache._reserved)
        ]
        cache._changes = cache.restated()
        return cache

    @property
    def registered(self) -> Sequence[RegisteredBlock]:
        """Registered blocks, parents before children."""
        return tuple(self._by_hash.values())

    @property
    def kept(self) -> Sequence[int]:
        """Pages kept for reuse, in order of eviction."""
        return tuple(self._kept)

    @property
    def free(self) -> Sequence[int]:
        """Pages that a sequence could get without an eviction."""
        return tuple(self._free)

    @property
    def reserved(self) -> Sequence[int]:
        """Pages reserved for copies."""
        return tuple(self._reserved)

    @property
    def withheld(self) -> Sequence[int]:
        """Pages that were evicted while another rank was reading them, in ascending order."""
        return tuple(sorted(self._withheld))

    @property
    def obtainable(self) -> int:
        """Pages that sequences could get, by evictions if necessary."""
        return len(self._free) + len(self._kept) - sum(page in self._kept for page in self._pins)

    @property
    def used(self) -> int:
        """Pages held by sequences or kept for reuse."""
        return self.pages - len(self._free) - len(self._reserved) - len(self._withheld)

    @property
    def held(self) -> int:
        """Pages held by sequences."""
        return self.used - len(self._kept)

    def blocks_for(self, tokens: int) -> int:
        """Pages needed for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def fits(self, prefix: Sequence[Block], pages: int, spare: int = 0) -> bool:
        """True if a new sequence that may share `prefix` can get `pages` pages in total and leave `spare`
        pages obtainable."""
        return self.lacking(prefix, pages, spare) <= 0

    def lacking(self, prefix: Sequence[Block], pages: int, spare: int = 0) -> int:
        """Return the number of pages that must become obtainable before `fits`. At most 0 if it fits."""
        shared = self._match(prefix)
        reused = sum(page in self._kept and page not in self._pins for page in shared)
        return pages - len(shared) + spare - self.obtainable + reused

    def open(self, prefix: Sequence[Block]) -> BlockTable:
        """Create the table of a new sequence. It holds the pages of the longest registered prefix."""
        pages = self._match(prefix)
        for page in pages:
            self._hold(page)
        return BlockTable(pages, len(pages))

    def extend(self, table: BlockTable, pages: int) -> bool:
        """Grow the table to `pages` pages, evicting kept blocks as needed. False if there are too few;
        nothing changes then."""
        missing = pages - len(table.pages)
        if missing <= 0:
            return True
        if missing > self.obtainable:
            return False
        self._evict_for(missing)
        for _ in range(missing):
            page = self._free.pop()
            self._holders[page] = 1
            table.pages.append(page)
        return True

    def register(self, table: BlockTable, blocks: Sequence[Block], computed: int) -> None:
        """Register the sequence's first `computed` blocks for sharing. All their tokens must be computed.

        `blocks` are the sequence's full blocks from its start.
        """
        fresh: list[Block] = []
        for index in range(table.registered, computed):
            if table.collided:
                break
            parent = blocks[index - 1].block_hash if index else None
            known = self._by_hash.get(blocks[index].block_hash)
            if known is None:
                self._by_hash[blocks[index].block_hash] = self._block_of[table.pages[index]] = (
                    RegisteredBlock(table.pages[index], blocks[index], parent)
                )
                fresh.append(blocks[index])
            else:
                self._announce(blocks, index, fresh)
                fresh = []
                self._share(table, index, known, known.holds(blocks[index], parent))
            table.registered += not table.collided
        self._announce(blocks, table.registered, fresh)

    def close(self, table: BlockTable) -> None:
        """Release the pages of a finished or preempted sequence. Registered pages are kept for reuse."""
        for page in reversed(table.pages):
            self._release(page)
        table.pages.clear()
        table.registered, table.collided = 0, False

    def reserve(self, *, evict: bool = False) -> int | None:
        """Take a page for copies of other ranks' pages. None if no page is free. evict: evict a kept page
        then."""
        if not self._free and not (evict and self.obtainable):
            return None
        self._evict_for(1)
        page = self._free.pop()
        self._reserved[page] = None
        return page

    def unreserve(self, page: int) -> None:
        """Free a reserved page."""
        del self._reserved[page]
        self._free.append(page)

    def registered_at(self, page: int) -> RegisteredBlock | None:
        """Return the registered block of a page. It is another object once the page has been evicted and
        registered again."""
        return self._block_of.get(page)

    def block(self, block_hash: int) -> Block | None:
        """Return the block that is registered under this hash, or None. Safe to call from another thread."""
        known = self._by_hash.get(block_hash)
        return None if known is None else known.block

    def has(self, block_hash: int) -> bool:
        """True if a block is registered under this hash."""
        return block_hash in self._by_hash

    def pin(self, page: int) -> None:
        """Do not reuse a registered page before `unpin` was called as often. Its block can be evicted."""
        self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        """End one `pin`."""
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            if page in self._withheld:
                self._withheld.remove(page)
                self._free.append(page)

    def clear(self) -> None:
        """Drop everything kept for reuse. ValueError while a sequence holds pages, because their registration
        cannot be revoked."""
        if self.held:
            raise ValueError(
                f"KV cache: {self.held} pages are held by running sequences; finish or cancel them before"
                " clearing"
            )
        for page in self._kept:
            self._vacate(page)
        self._kept.clear()
        self._by_hash.clear()
        self._block_of.clear()
        self._changes.append("cleared")

    def take_changes(self) -> list[Change]:
        """Return the stored, removed and cleared events since the last call, in order, parents before
        children."""
        changes, self._changes = self._changes, []
        return changes

    def restated(self) -> list[Change]:
        """Return the whole cache as changes that apply to any earlier state: "cleared", then everything
        registered, parents first."""
        return ["cleared", *self._runs()]

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """RuntimeError that names the page, unless the internal state is consistent and agrees with `tables`,
        all open ones."""
        holders = [0] * self.pages
        for table in tables:
            for page in table.pages:
                holders[page] += 1
        free = set(self._free)
        for page in range(self.pages):
            states = (
                (page in free)
                + (page in self._kept)
                + (self._holders[page] > 0)
                + (page in self._reserved)
                + (page in self._withheld)
            )
            if states != 1 or holders[page] != self._holders[page]:
                raise RuntimeError(
                    f"KV cache: page {page} is in {states} states, held {self._holders[page]} times by count"
                    f" and {holders[page]} by tables"
                )
        if len(free) != len(self._free) or any(page not in self._block_of for page in self._kept):
            raise RuntimeError("KV cache: a page is free twice, or kept without a block")
        for page, entry in self._block_of.items():
            registered = self._by_hash.get(entry.block.block_hash)
            if (
                registered is not entry
                or entry.page != page
                or (entry.parent is not None and entry.parent not in self._by_hash)
            ):
                raise RuntimeError(
                    f"KV cache: the block of page {page} is registered elsewhere or has lost its parent"
                )

    def _match(self, prefix: Sequence[Block]) -> list[int]:
        """Return the pages of the longest registered prefix. Each parent was compared before, so comparing
        its hash suffices."""
        pages: list[int] = []
        parent: int | None = None
        for block in prefix:
            name = block.identity.block_hash
            known = self._by_hash.get(name)
            if known is None or known.block != block or known.parent != parent:
                break
            pages.append(known.page)
            parent = name
        return pages

    def _hold(self, page: int) -> None:
        self._kept.pop(page, None)
        self._holders[page] += 1

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._block_of:
            self._kept[page] = None
        else:
            self._free.append(page)

    def _evict_for(self, count: int) -> None:
        """Evict kept pages until `count` pages are free. There must be as many obtainable ones."""
        removed = []
        while len(self._free) < count:
            page = next(iter(self._kept))
            del self._kept[page]
            block = self._block_of.pop(page).block
            del self._by_hash[block.block_hash]
            self._vacate(page)
            removed.append(block.block_hash)
        if removed:
            self._changes.append(KvChange(removed=KvRemoved(block_hashes=tuple(removed))))

    def _vacate(self, page: int) -> None:
        """Free a page that is registered no longer, now or once it is unpinned."""
        if page in self._pins:
            self._withheld.add(page)
        else:
            self._free.append(page)

    def _share(self, table: BlockTable, index: int, known: RegisteredBlock, same: bool) -> None:
        """Handle a block that was computed twice: both sequences share one page from now on. If its hash
        names another block, keep it private."""
        if not same:
            table.collided = True
            return
        page = table.pages[index]
        self._hold(known.page)
        table.pages[index] = known.page
        self._release(page)

    def _announce(self, blocks: Sequence[Block], end: int, fresh: list[Block]) -> None:
        if fresh:
            start = end - len(fresh)
            parent = blocks[start - 1].block_hash if start else None
            stored = tuple(block.identity for block in fresh)
            self._changes.append(KvChange(stored=KvStored(blocks=stored, parent_hash=parent)))

    def _runs(self) -> Iterator[KvChange]:
        run: list[KvBlock] = []
        parent: int | None = None
        for entry in self._by_hash.values():
            if run and entry.parent != run[-1].block_hash:
                yield KvChange(stored=KvStored(blocks=tuple(run), parent_hash=parent))
                run = []
            if not run:
                parent = entry.parent
            run.append(entry.block.identity)
        if run:
            yield KvChange(stored=KvStored(blocks=tuple(run), parent_hash=parent))
