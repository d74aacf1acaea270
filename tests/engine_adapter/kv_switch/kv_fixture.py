"""An engine of P ranks over a pretend KV memory: it serves, switches its attention, and checks every byte.

The KV of a position is a hash of the head group and of all tokens up to it. A decoding step reads the whole
context back through the unit tables, so a unit with other content is found by whoever reads it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import KvCache
from engine_adapter.batching.scheduler import BatchScheduler, SequenceState, Slice
from engine_adapter.kv_switch.kv_state import KvState, OpenSequence, Switched, UnitRead, group_of_rank
from engine_adapter.kv_switch.merging import merge
from engine_adapter.kv_switch.scheduler_state import AheadCopies, RequestOrigin, restore, state_of
from engine_adapter.kv_switch.splitting import split
from tests.engine_adapter.kv_event_mirror import KvEventMirror

SIZE = 4


def kv_values(group: int, tokens: Sequence[int], salt: str, end: int) -> list[int]:
    """KV of the first `end` positions in one head group."""
    digest = xxhash.xxh3_64(f"{group} {salt}".encode())
    values: list[int] = []
    for token in tokens[:end]:
        digest.update(bytes([token]))
        values.append(digest.intdigest())
    return values


def next_token(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(bytes(tokens)) % 3


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Tokens of a request that is served alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class ServedScheduler:
    """One scheduler, its unit table, [pages, units of a page], and all that a router knows from its events."""

    scheduler: BatchScheduler
    units: NDArray[np.int32]
    known: KvEventMirror = field(default_factory=KvEventMirror)

    def read_events(self) -> None:
        self.known.apply(self.scheduler.cache.take_changes())


class SwitchableEngine:
    """P ranks with G head groups and `blocks` pages each under data-parallel attention."""

    def __init__(
        self,
        ranks: int,
        groups: int,
        blocks: int,
        *,
        seed: int = 0,
        max_running: int = 4,
        preempt: bool = False,
    ) -> None:
        self.ranks, self.groups, self.blocks = ranks, groups, blocks
        self.max_running, self.preempt = max_running, preempt
        self.random = random.Random(seed)
        noise = np.random.default_rng(seed)
        shape = (ranks, blocks * groups, SIZE)
        self.memory = noise.integers(0, 1 << 64, shape, dtype=np.uint64)
        """KV, [ranks, units, positions]."""
        self.tensor_parallel = False
        self.origins: dict[SequenceState, RequestOrigin] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.finished: set[int] = set()
        self.served = [self._fresh() for _ in range(ranks)]

    def _fresh(self) -> ServedScheduler:
        units = self.random.sample(range(self.blocks * self.groups), self.blocks * self.groups)
        table = np.array(units, np.int32).reshape(self.blocks, self.groups)
        return ServedScheduler(self._scheduler(KvCache(self.blocks, SIZE)), table)

    def _scheduler(self, cache: KvCache) -> BatchScheduler:
        return BatchScheduler(
            cache, max_batch_tokens=self.max_running + 8, max_running=self.max_running, max_waiting=1000
        )

    def submit(self, rank: int, prompt: Sequence[int], count: int, salt: str = "") -> int:
        """Queue a request that `rank` accepted. Return its number."""
        number = len(self.prompts)
        self.prompts[number] = list(prompt), count
        sequence = SequenceState(list(prompt), count, salt=salt)
        self.origins[sequence] = RequestOrigin(rank, number, arrived=number, request=b"%d" % number)
        self.served[0 if self.tensor_parallel else rank].scheduler.submit(sequence)
        return number

    def cancel(self, number: int) -> None:
        for sequence, origin in list(self.origins.items()):
            if origin.number == number:
                for one in self.served:
                    if sequence in (*one.scheduler.running_sequences, *one.scheduler.waiting_sequences):
                        one.scheduler.remove(sequence)
                del self.origins[sequence]

    @property
    def open_requests(self) -> set[int]:
        return {origin.number for origin in self.origins.values()}

    def step(self) -> None:
        """One step of every scheduler."""
        plans = [one.scheduler.plan() for one in self.served]
        self.exchange_notes()
        for owner, (one, slices) in enumerate(zip(self.served, plans, strict=True)):
            for work in slices:
                self._write(owner, work)
            sampled = [work.sequence for work in slices if work.last and self._reads_right(owner, work)]
            for work in slices:
                one.scheduler.computed(work)
            for sequence in sampled:
                one.scheduler.append(sequence, next_token(sequence.tokens))
                if sequence.generated == sequence.max_new:
                    self._finish(one, sequence)
            one.scheduler.check_integrity()
            one.read_events()

    def exchange_notes(self) -> None:
        """Called in each step between plan and forward pass."""

    def _finish(self, one: ServedScheduler, sequence: SequenceState) -> None:
        number = self.origins.pop(sequence).number
        assert sequence.tokens == answer(*self.prompts[number])
        self.finished.add(number)
        one.scheduler.remove(sequence)

    def run_dry(self) -> None:
        for _ in range(10_000):
            if not self.origins:
                assert all(one.scheduler.idle and not one.scheduler.cache.held for one in self.served)
                return
            self.step()
        raise AssertionError("requests never finish")

    def _places(self, owner: int, row: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where the KV of a page is needed: rank, head group, unit."""
        if self.tensor_parallel:
            return [
                (rank, group_of_rank(rank, self.ranks, self.groups), unit) for rank, unit in enumerate(row)
            ]
        return [(owner, group, unit) for group, unit in enumerate(row)]

    def _write(self, owner: int, work: Slice) -> None:
        sequence, end = work.sequence, work.start + work.count
        values = {
            group: kv_values(group, sequence.tokens, sequence.salt, end) for group in range(self.groups)
        }
        for position in range(work.start, end):
            row = self.served[owner].units[sequence.table.pages[position // SIZE]].tolist()
            for rank, group, unit in self._places(owner, row):
                self.memory[rank, unit, position % SIZE] = values[group][position]

    def _reads_right(self, owner: int, work: Slice) -> bool:
        self._check_content(
            owner,
            work.sequence.tokens,
            work.sequence.salt,
            work.start + work.count,
            self.served[owner].units[work.sequence.table.pages].tolist(),
        )
        return True

    def _check_content(
        self, owner: int, tokens: Sequence[int], salt: str, end: int, rows: Sequence[Sequence[int]]
    ) -> None:
        """Every rank that needs a page has the KV of these tokens in its unit of it."""
        for group in range(self.groups):
            expected = np.array(kv_values(group, tokens, salt, end), np.uint64)
            for at, row in enumerate(rows[: -(-end // SIZE)]):
                for rank, own, unit in self._places(owner, row):
                    if own == group:
                        part = expected[at * SIZE : (at + 1) * SIZE]
                        assert (self.memory[rank, unit, : len(part)] == part).all(), (
                            f"rank {rank}: unit {unit} has other content"
                        )

    def states(self) -> list[KvState]:
        """State of each scheduler, as the wire carries it."""
        states = [
            state_of(
                one.scheduler,
                one.units,
                self.origins,
                tensor_parallel=self.tensor_parallel,
                copies=self.copies(owner),
            )
            for owner, one in enumerate(self.served)
        ]
        return msgspec.msgpack.decode(msgspec.msgpack.encode(states), type=list[KvState])

    def copies(self, owner: int) -> AheadCopies | None:
        """Copies that were made ahead, for the state of a scheduler. None: there is no pre-copy."""
        return None

    def plan_switch(self) -> Switched:
        """Decide a switch to the other attention. Nothing changes."""
        states = self.states()
        if self.tensor_parallel:
            return split(
                states[0],
                ranks=self.ranks,
                groups=self.groups,
                max_pages=self.blocks,
                max_running=self.max_running,
                block_size=SIZE,
                preempt=self.preempt,
            )
        return merge(
            states,
            groups=self.groups,
            max_running=self.max_running * self.ranks,
            block_size=SIZE,
            preempt=self.preempt,
        )

    def switch(self) -> Switched:
        """Switch to the other attention, and check all books and bytes."""
        before = self.states()
        switched = self.plan_switch()
        assert switched == self.plan_switch(), "ranks would decide differently"
        assert before == self.states()
        self.carry_out(switched.reads)
        self.adopt(switched.states)
        self.check_registry(before, switched)
        self.check_requests(before)
        self.check_memory()
        return switched

    def carry_out(self, reads: Sequence[Sequence[UnitRead]]) -> None:
        """Do all reads of all ranks in a random order."""
        todo = [(rank, read) for rank, ours in enumerate(reads) for read in ours]
        self.random.shuffle(todo)
        assert len({(rank, read.unit) for rank, read in todo}) == len(todo), "a unit is written twice"
        for rank, (source_rank, source, unit) in todo:
            self.memory[rank, unit] = self.memory[source_rank, source]

    def adopt(self, states: Sequence[KvState]) -> None:
        self.tensor_parallel = not self.tensor_parallel
        scale = self.ranks if self.tensor_parallel else 1
        known: Mapping[int, RequestOrigin] = {origin.number: origin for origin in self.origins.values()}
        self.served, self.origins = [], {}
        for state in states:
            scheduler, sequences, units = restore(
                state,
                pages=self.blocks * (self.groups if self.tensor_parallel else 1),
                page_units=self.ranks if self.tensor_parallel else self.groups,
                max_batch_tokens=self.max_running * scale + 8,
                max_running=self.max_running * scale,
                max_waiting=1000,
                block_size=SIZE,
            )
            scheduler.check_integrity()
            self.served.append(ServedScheduler(scheduler, units))
            for one, sequence in sequences:
                self.origins[sequence] = known[one.number]
                assert (one.rank, one.request) == (known[one.number].rank, known[one.number].request)
        assert len(self.origins) == len(known), "a request was lost"

    def check_registry(self, before: Sequence[KvState], switched: Switched) -> None:
        """Registered hashes are those of before, less the evicted ones, and the events say so."""
        hashes = [page.block.block_hash for state in before for page in state.pages if page.block is not None]
        after: set[int] = set()
        for one in self.served:
            one.read_events()
            registered = {entry.block.block_hash for entry in one.scheduler.cache.registered}
            assert registered == set(one.known.parents)
            after |= registered
        assert len(set(switched.evicted)) == len(switched.evicted)
        assert not after & set(switched.evicted)
        assert after | set(switched.evicted) == set(hashes)

    def check_requests(self, before: Sequence[KvState]) -> None:
        """Requests have what they had, except that preempted ones have no pages."""
        old = {one.number: one for state in before for one in (*state.running, *state.waiting)}
        for state in self.states():
            for one in state.waiting:
                assert self._same(one, old[one.number], pages=False)
            for one in state.running:
                assert self._same(one, old[one.number], pages=True)

    def _same(self, one: OpenSequence, old: OpenSequence, *, pages: bool) -> bool:
        placed = ["pages", "registered", "collided"] + ([] if pages else ["computed"])
        blank = dict.fromkeys(placed, 0)
        assert len(one.pages) == (len(old.pages) if pages else 0)
        return msgspec.to_builtins(one) | blank == msgspec.to_builtins(old) | blank

    def check_memory(self) -> None:
        """Tables name each unit once, and units have the KV that their pages need, kept ones included."""
        every = list(range(self.blocks * self.groups))
        for rank in range(self.ranks):
            table = self.served[0].units[:, rank] if self.tensor_parallel else self.served[rank].units
            assert sorted(table.ravel().tolist()) == every
        for owner, one in enumerate(self.served):
            for sequence in one.scheduler.running_sequences:
                rows = one.units[sequence.table.pages].tolist()
                self._check_content(owner, sequence.tokens, sequence.salt, sequence.computed, rows)
            chains: dict[int, tuple[list[int], list[list[int]]]] = {}
            for entry in one.scheduler.cache.registered:
                tokens, rows = ([], []) if entry.parent is None else chains[entry.parent]
                tokens = tokens + np.frombuffer(entry.block.tokens, "<u4").tolist()
                rows = [*rows, one.units[entry.page].tolist()]
                chains[entry.block.block_hash] = tokens, rows
                self._check_content(owner, tokens, entry.block.salt, len(tokens), rows)
