"""Steps that are measured: their kinds, and the sequences of each rank in them. Pure."""

from typing import NamedTuple

from engine_adapter.embedded.paged_attention import PAGE_TOKENS
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
"""Longest time for one step of each kind in all layouts: a slow engine measures fewer sequences and
tokens."""
_STRIDE = 7919
"""Between the tokens that are measured: a prime, so that all tokens of a vocabulary come before one comes
again. Equal ones would all go to the same experts."""


class DecodeCell(NamedTuple):
    """Steps in which sequences decode."""

    sequences: int
    """Of the engine."""
    context: int
    """Tokens of each at the end of its last page, which these steps fill."""

    @property
    def tokens(self) -> int:
        """Tokens of a sequence in one step."""
        return 1

    @property
    def cached(self) -> int:
        """Tokens of a sequence whose KV is there before the first step: whole pages."""
        return (self.context - 1) // PAGE_TOKENS * PAGE_TOKENS

    @property
    def steps(self) -> int:
        """Steps until the context is full."""
        return self.context - self.cached


class PromptCell(NamedTuple):
    """Steps in which every rank computes a chunk of a prompt, or rank 0 alone."""

    tokens: int
    cached: int = 0
    """Tokens before them, whose KV is there: whole pages."""
    alone: bool = False

    @property
    def context(self) -> int:
        return self.cached + self.tokens

    @property
    def steps(self) -> int:
        """Steps until the prompt is computed."""
        return 1


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
    Every product has room in the engine's pages: with many sequences, the long context is shorter. A rank
    admits a sequence only if each running one can grow by a page."""
    longest = max(1, min(_CONTEXTS[-1], room.positions, room.pages * PAGE_TOKENS))
    # Sequences of a rank have whole pages, and the ranks have unequal numbers of sequences.
    most = max(1, min(room.sequences, room.tokens, room.pages // room.ranks // 2) * room.ranks)
    pages = max(1, room.pages // (-(-most // room.ranks) * room.ranks) - 1)
    contexts = sorted({min(context, longest, pages * PAGE_TOKENS) for context in _CONTEXTS})
    counts = sorted({round(most ** (at / (BATCHES - 1))) for at in range(BATCHES)})
    return Batches(tuple(counts), tuple(contexts))


def affordable(room: Room, decode: float, prompt: float, layouts: int) -> Room:
    """Return the room with fewer sequences and tokens, if measuring all steps once would take longer than
    `ROUND_SECONDS`. decode: seconds of the largest step of decoding sequences. prompt: of a step full of
    prompt tokens. layouts: that are measured."""
    of_sequence, of_token = decode / batches(room).sequences[-1], prompt / prompts(room)[0].tokens
    while (seconds := _round_seconds(room, of_sequence, of_token, layouts)) > ROUND_SECONDS:
        share = ROUND_SECONDS / seconds
        sequences, tokens = batches(room).sequences[-1] // room.ranks, prompts(room)[0].tokens
        room = room._replace(sequences=max(1, int(sequences * share)), tokens=max(1, int(tokens * share)))
        if room.sequences == 1 or room.tokens == 1:
            break
    return room


def _round_seconds(room: Room, of_sequence: float, of_token: float, layouts: int) -> float:
    """Return the seconds of one step of each kind, if they grow with sequences and tokens. Every layout has a
    step full of prompt tokens; two have others."""
    decodes = of_sequence * sum(cell.sequences for cell in batches(room).cells)
    full, *others = (of_token * cell.tokens for cell in prompts(room))
    return layouts * (decodes + full) + 2 * sum(others)


def prompts(room: Room) -> list[PromptCell]:
    """Return steps of prompts: first a full one on every rank, then one behind a context, then on rank 0
    alone."""
    of_rank = (room.pages // room.ranks - 1) * PAGE_TOKENS  # one page is for the first token of the answer
    positions = max(1, min(room.positions, of_rank))
    tokens = max(1, min(_PROMPT_TOKENS, room.tokens, positions // 2))
    cached = min(_CACHED_TOKENS, positions - tokens) // PAGE_TOKENS * PAGE_TOKENS
    cells = [
        PromptCell(max(1, min(_FULL_TOKENS, room.tokens, positions))),
        PromptCell(tokens, cached),
        PromptCell(max(1, tokens // 4), alone=True),
        PromptCell(tokens, alone=True),
    ]
    return [one for at, one in enumerate(cells) if one not in cells[:at]]


def owned(cell: Cell, attention: AttentionKind, rank: int, ranks: int) -> range:
    """Return the numbers of the sequences that a rank owns: under tensor-parallel attention, rank 0 owns all
    of them."""
    count = cell.sequences if isinstance(cell, DecodeCell) else 1 if cell.alone else ranks
    if attention == "tp":
        return range(count if rank == 0 else 0)
    return range(rank, count, ranks)


def known_tokens(cell: Cell, number: int, vocabulary: int) -> list[int]:
    """Return the tokens that a sequence has before the first step: those that are cached, and those to
    compute."""
    return [at * _STRIDE % vocabulary for at in range(cell.cached)] + [
        next_token(number * cell.tokens + at, vocabulary) for at in range(cell.tokens)
    ]


def next_token(number: int, vocabulary: int) -> int:
    """Return a token to compute, different for numbers near each other."""
    return number * _STRIDE % vocabulary
