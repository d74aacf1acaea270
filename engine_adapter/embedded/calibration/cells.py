"""Steps that are measured: their kinds, and the work of each rank in them. Pure."""

from typing import NamedTuple

from engine_adapter.embedded.model_runner import PAGE_TOKENS, SequenceWork
from fleet.layout import AttentionKind

BATCHES = 6
"""Numbers of decoding sequences that are measured, at most."""
_CONTEXTS = (64, 1024)
"""Tokens of a sequence in short and in long contexts, where the engine has room for them."""
_FULL_TOKENS = 512
"""Most tokens of a rank in a step full of prompt tokens."""
_PROMPT_TOKENS, _CACHED_TOKENS = 256, 768
"""Most tokens of other prompts that are measured, and most of those before them, to measure the cost per
pair."""
ROUND_SECONDS = 4.0
"""Longest time for one step of each kind in all layouts: a slow engine measures fewer sequences."""
_STRIDE = 7919
"""Between the tokens that are measured: a prime, so that all tokens of a vocabulary come before one comes
again. Equal ones would all go to the same experts."""


class DecodeCell(NamedTuple):
    """Steps in which sequences decode."""

    sequences: int
    """Of the engine."""
    context: int
    """Tokens of each, with the one that is computed."""


class PromptCell(NamedTuple):
    """Steps in which every rank computes a chunk of a prompt, or rank 0 alone."""

    tokens: int
    cached: int = 0
    """Tokens before them, whose KV is there."""
    alone: bool = False

    @property
    def context(self) -> int:
        return self.cached + self.tokens


Cell = DecodeCell | PromptCell


class Room(NamedTuple):
    """Limits of an engine's steps, in every layout that is measured."""

    ranks: int
    sequences: int
    """That a rank runs."""
    tokens: int
    """Of a rank in one step."""
    pages: int
    """KV pages of the engine."""
    positions: int
    """Longest sequence."""


class Batches(NamedTuple):
    """Numbers of sequences and contexts whose products are measured. Ascending."""

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]

    @property
    def cells(self) -> list[DecodeCell]:
        return [DecodeCell(count, context) for context in self.contexts for count in self.sequences]


def batches(room: Room) -> Batches:
    """Return numbers of sequences from 1 to as many as the engine can run, in equal ratios, and contexts.
    Every product has room in the engine's pages: with many sequences, the long context is shorter."""
    longest = max(1, min(_CONTEXTS[-1], room.positions, room.pages * PAGE_TOKENS))
    # Sequences of a rank have whole pages, and the ranks have unequal numbers of sequences.
    most = max(1, min(room.sequences, room.tokens, room.pages // room.ranks) * room.ranks)
    pages = max(1, room.pages // (-(-most // room.ranks) * room.ranks))
    contexts = sorted({min(context, longest, pages * PAGE_TOKENS) for context in _CONTEXTS})
    counts = sorted({round(most ** (at / (BATCHES - 1))) for at in range(BATCHES)})
    return Batches(tuple(counts), tuple(contexts))


def affordable(room: Room, slowest: float, layouts: int) -> Room:
    """Return the room with fewer sequences, if measuring all steps once would take longer than
    `ROUND_SECONDS`. slowest: seconds of the largest step. layouts: that are measured."""
    # In equal ratios, all batches together take about twice as long as the largest, in each of two contexts.
    expected = 2 * len(_CONTEXTS) * layouts * slowest
    if expected <= ROUND_SECONDS:
        return room
    most = batches(room).sequences[-1] // room.ranks
    return room._replace(sequences=max(1, int(most * ROUND_SECONDS / expected)))


def prompts(room: Room) -> list[PromptCell]:
    """Return steps of prompts: first a full one on every rank, then one behind a context, then on rank 0
    alone."""
    of_rank = room.pages // room.ranks * PAGE_TOKENS
    positions = max(1, min(room.positions, of_rank))
    tokens = max(1, min(_PROMPT_TOKENS, room.tokens, positions // 2))
    cells = [
        PromptCell(max(1, min(_FULL_TOKENS, room.tokens, positions))),
        PromptCell(tokens, cached=min(_CACHED_TOKENS, positions - tokens)),
        PromptCell(max(1, tokens // 4), alone=True),
        PromptCell(tokens, alone=True),
    ]
    return [one for at, one in enumerate(cells) if one not in cells[:at]]


def works(cell: Cell, attention: AttentionKind, rank: int, ranks: int, vocabulary: int) -> list[SequenceWork]:
    """Return the work of a rank: under tensor-parallel attention, all ranks have that of the whole engine.
    Sequences of a rank have pages of their own, from page 0 on."""
    count = cell.sequences if isinstance(cell, DecodeCell) else 1 if cell.alone else ranks
    mine = range(count) if attention == "tp" else range(rank, count, ranks)
    tokens = 1 if isinstance(cell, DecodeCell) else cell.tokens
    pages = -(-cell.context // PAGE_TOKENS)
    return [
        SequenceWork(
            [(number * tokens + at) * _STRIDE % vocabulary for at in range(tokens)],
            cell.context - tokens,
            range(place * pages, (place + 1) * pages),
            needs_logits=True,
        )
        for place, number in enumerate(mine)
    ]
