"""Ranks of one engine as threads of this process: their forward passes, and texts that they compute
together."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.model_runner import ModelRunner, SequenceWork
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from engine_adapter.embedded.step_sync import RankGroup
from fleet.placement import Placement

Found = TypeVar("Found")
PATIENCE = 100.0
"""seconds that a step of all ranks may take on a busy machine"""


@dataclass
class Text:
    """A text: a prompt that one step computes, and tokens that follow one by one."""

    prompt: Sequence[int]
    count: int
    """logits behind the prompt and behind each token that follows it, but the last"""
    forced: Sequence[int] | None = None
    """the tokens that follow; None: the most likely ones"""
    chosen: list[int] = field(default_factory=list)
    """the most likely token at each of these positions"""
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.chosen) == self.count

    def work(self) -> SequenceWork:
        if not self.chosen:
            return SequenceWork(self.prompt, 0, self.pages, needs_logits=True)
        tokens = self.chosen if self.forced is None else self.forced
        at = len(self.chosen) - 1
        return SequenceWork(tokens[at : at + 1], len(self.prompt) + at, self.pages, needs_logits=True)

    def take(self, logits: NDArray[np.float32]) -> None:
        self.logits.append(logits)
        self.chosen.append(int(logits.argmax()))


class RankThreads:
    """One thread for each rank. All are joined once, and serve one placement after another."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """folder: where the ranks meet, a fresh one."""
        self.ranks = ranks
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(ranks)]
        self._groups = self.each(lambda rank: RankGroup(folder, rank, ranks) if ranks > 1 else None)

    def each(self, call: Callable[[int], Found]) -> list[Found]:
        """Let every rank do this at the same time. What each returned, by rank."""
        begun = [thread.submit(call, rank) for rank, thread in enumerate(self._threads)]
        return [one.result(PATIENCE) for one in begun]

    def load(self, folder: Path, placement: Placement, **settings: object) -> list[ModelRunner]:
        """Ranks that have just loaded a checkpoint for this placement."""

        def loaded(rank: int) -> ModelRunner:
            with Checkpoint(folder) as checkpoint:
                return ModelRunner(
                    checkpoint, placement, rank=rank, group=self._groups[rank], **{"kv_pages": 256} | settings
                )

        return self.each(loaded)

    def compute(self, runners: Sequence[ModelRunner], texts: Sequence[Sequence[Text]]) -> None:
        """Compute the texts of each rank to their ends, all that are not over in every step."""
        for rank, mine in enumerate(texts):
            free = iter(np.random.default_rng(rank).permutation(runners[rank].kv_pages).tolist())
            for text in mine:
                length = len(text.prompt) + text.count
                text.pages = [next(free) for _ in range(-(-length // PAGE_TOKENS))]
        while any(not text.over for mine in texts for text in mine):
            going = [[text for text in mine if not text.over] for mine in texts]
            works = [[text.work() for text in mine] for mine in going]
            tokens = [sum(len(work.tokens) for work in mine) for mine in works]
            steps = self.each(lambda rank: runners[rank].forward(works[rank], tokens).logits.numpy().copy())  # noqa: B023
            for mine, logits in zip(going, steps, strict=True):
                for text, row in zip(mine, logits, strict=True):
                    text.take(row)

    def close(self) -> None:
        self.each(lambda rank: None if (group := self._groups[rank]) is None else group.close())
        for thread in self._threads:
            thread.shutdown()


@contextmanager
def rank_threads(folder: Path, ranks: int) -> Iterator[RankThreads]:
    """Threads that end with the block."""
    threads = RankThreads(folder, ranks)
    try:
        yield threads
    finally:
        threads.close()
