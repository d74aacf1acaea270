"""Batch scheduler: continuous batching with a token budget per step. Pure: tokens in, slices out.

Rules, in order:
1. Every decoding sequence gets its one token, oldest first. The budget exceeds `max_running`, so prefill
   never starves.
2. The rest of the budget goes to prompts, oldest first, in chunks (chunked prefill). Decode waits for at most
   one bounded step.
3. A waiting request is admitted when there are pages for all its tokens and every running sequence could
   still grow by one page.
4. When a decoding sequence finds no page, the latest arrival is preempted: its pages are released, and it
   returns to the front of the queue. Later it recomputes what the cache has evicted by then. So the oldest
   sequence is never stopped, and every request finishes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine_adapter.batching.kv_cache import Block, BlockTable, KvCache, following, identify
from engine_adapter.engine import RankLoad


class Overloaded(Exception):
    """The waiting queue is full. Try another rank, or retry later."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(
            f"the rank is full and {max_waiting} requests are waiting, which is the limit (max_waiting);"
            " retry later or elsewhere"
        )
        self.max_waiting = max_waiting


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one request in the rank. Only the scheduler changes it."""

    tokens: list[int]
    """Prompt, then generated tokens."""
    max_new: int
    """Maximum number of tokens to generate."""
    computed: int = 0
    """Tokens whose KV is in pages."""
    generated: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the first admission found in the cache."""
    admissions: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    blocks: list[Block] = field(default_factory=list)
    """Full blocks of `tokens`."""
    salt: str = ""
    """KV is shared only with requests of the same salt."""

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.computed

    @property
    def preemptions(self) -> int:
        return max(0, self.admissions - 1)


@dataclass(frozen=True, slots=True)
class Slice:
    """Work on a sequence: `count` tokens from position `start`. last: these are all known tokens, so a new
    token can be sampled after them."""

    sequence: SequenceState
    start: int
    count: int
    last: bool

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]


class BatchScheduler:
    """Queue and running set of one rank over its KV cache."""

    def __init__(self, cache: KvCache, *, max_batch_tokens: int, max_running: int, max_waiting: int) -> None:
        if max_batch_tokens <= max_running:
            raise ValueError(
                f"scheduler: max_batch_tokens {max_batch_tokens} must exceed max_running {max_running}, or"
                " prompts starve behind decoding"
            )
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        """In order of arrival."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def running_sequences(self) -> Sequence[SequenceState]:
        """Sequences that hold pages, in order of arrival."""
        return tuple(self._running)

    @property
    def waiting_sequences(self) -> Sequence[SequenceState]:
        """Sequences without pages, in order of admission."""
        return tuple(self._waiting)

    @property
    def lacking_pages(self) -> int:
        """Pages that must become obtainable before the first waiting request is admitted. 0 if it does not
        wait for pages."""
        if not self._waiting or len(self._running) >= self.max_running:
            return 0
        return max(0, self.cache.lacking(*self._need(self._waiting[0])))

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def uncomputed_prompt_tokens(self) -> int:
        """Tokens in prefill or waiting for it. Possible cache hits of waiting requests are unknown and not
        subtracted."""
        return sum(one.pending for one in self._running if one.pending > 1) + sum(
            one.pending for one in self._waiting
        )

    def load(self, step_seconds: float | None) -> RankLoad:
        """Return the current load. step_seconds: as in `RankLoad`."""
        return RankLoad(
            running=self.running,
            waiting=self.waiting,
            prefill_tokens=self.uncomputed_prompt_tokens,
            decode_blocks=self.cache.held,
            used_blocks=self.cache.used,
            step_seconds=step_seconds,
        )

    def submit(self, sequence: SequenceState) -> None:
        """Queue a request. Overloaded when `max_waiting` + `max_running` requests are open. ValueError when
        the request can never be served."""
        known, room = len(sequence.tokens), self.cache.pages * self.cache.block_size
        if not known or sequence.max_new < 1 or known + sequence.max_new > room:
            raise ValueError(
                f"request of {known} tokens and {sequence.max_new} to generate: at least 1 and 1 are"
                f" needed, and {room} in all fit"
            )
        if len(self._waiting) + len(self._running) >= self.max_waiting + self.max_running:
            raise Overloaded(self.max_waiting)
        if not sequence.blocks:
            sequence.blocks = identify(sequence.tokens, self.cache.block_size, sequence.salt)
        self._waiting.append(sequence)

    def restore(self, running: Iterable[SequenceState], waiting: Iterable[SequenceState]) -> None:
        """Take over requests that another scheduler admitted, in the order of the properties above. Tables of
        running sequences must be those of the cache. No limit applies to requests that wait. ValueError
        unless the scheduler is idle and has room for the running ones."""
        taken = list(running)
        if not self.idle or len(taken) > self.max_running:
            raise ValueError(
                f"scheduler: cannot restore {len(taken)} running requests beside {self.running} running and"
                f" {self.waiting} waiting ones, where {self.max_running} may run; take a new scheduler"
            )
        self._running = taken
        self._waiting = deque(waiting)
        for one in (*self._running, *self._waiting):
            one.blocks = identify(one.tokens, self.cache.block_size, one.salt, known=one.blocks)

    def plan(self, *, prompts: bool = True) -> list[Slice]:
        """Plan the next step. Empty when there is no work. Each slice must be passed to `computed` before the
        next plan. prompts: False holds prompts back."""
        self._grow()
        slices = [self._slice(one, 1) for one in self._running if one.pending == 1]
        budget = self.max_batch_tokens - len(slices)
        for one in self._prompts() if prompts else ():
            if budget <= 0:
                break
            slices.append(self._slice(one, budget))
            budget -= slices[-1].count
        return slices

    def computed(self, done: Slice) -> None:
        """Record that the slice's tokens are computed and their KV is in the pages."""
        one = done.sequence
        one.computed = done.start + done.count
        full = one.computed // self.cache.block_size
        if full > one.table.registered:
            self.cache.register(one.table, one.blocks, full)

    def append(self, sequence: SequenceState, token: int) -> None:
        """Append a sampled token to the sequence."""
        sequence.tokens.append(token)
        sequence.generated += 1
        size = self.cache.block_size
        if len(sequence.tokens) % size == 0:
            last = sequence.blocks[-1] if sequence.blocks else None
            sequence.blocks.append(following(last, sequence.tokens[-size:], sequence.salt))

    def remove(self, sequence: SequenceState) -> None:
        """Free everything that a finished or cancelled request holds. Unknown requests are ignored, because
        both events may coincide."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self.cache.close(sequence.table)

    def check_idle(self) -> None:
        """RuntimeError when pages are held although nothing runs: a leak. Cheap enough to call each time the
        rank becomes idle."""
        if not self._running and self.cache.held:
            self.check_integrity()

    def check_integrity(self) -> None:
        """RuntimeError unless exactly the running sequences hold pages and the cache is consistent."""
        if any(one.table.pages for one in self._waiting):
            raise RuntimeError("scheduler: a waiting request holds pages")
        self.cache.check_integrity(one.table for one in self._running)

    def _grow(self) -> None:
        for one in self._running.copy():
            need = self.cache.blocks_for(len(one.tokens))
            while one.table.pages and not self.cache.extend(one.table, need):
                self._preempt(self._running[-1])

    def _preempt(self, latest: SequenceState) -> None:
        self._running.pop()
        self.cache.close(latest.table)
        latest.computed = 0
        self._waiting.appendleft(latest)

    def _prompts(self) -> Iterator[SequenceState]:
        yield from [one for one in self._running if one.pending > 1]
        while self._waiting and len(self._running) < self.max_running and self._admissible(self._waiting[0]):
            yield self._admit(self._waiting.popleft())

    def _shareable(self, one: SequenceState) -> list[Block]:
        """Return the blocks that may come from the cache. The last token is always computed, because its
        logits are needed."""
        return one.blocks[: (len(one.tokens) - 1) // self.cache.block_size]

    def _admissible(self, one: SequenceState) -> bool:
        return self.cache.fits(*self._need(one))

    def _need(self, one: SequenceState) -> tuple[list[Block], int, int]:
        """Return the arguments of `KvCache.fits` for a waiting request."""
        return self._shareable(one), self.cache.blocks_for(len(one.tokens)), len(self._running)

    def _admit(self, one: SequenceState) -> SequenceState:
        one.table = self.cache.open(self._shareable(one))
        one.computed = len(one.table.pages) * self.cache.block_size
        if not one.admissions:
            one.cached_tokens = one.computed
        one.admissions += 1
        self.cache.extend(one.table, self.cache.blocks_for(len(one.tokens)))
        self._running.append(one)
        return one

    def _slice(self, one: SequenceState, budget: int) -> Slice:
        count = min(budget, one.pending)
        return Slice(one, one.computed, count, last=count == one.pending)
