"""What a request would cost on each candidate, in milliseconds, term by term. Pure numpy."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.timing import decode_seconds, dispatch_seconds, prefill_seconds, queue_seconds
from router.reservations import BLOCKS, PREFILL, SEQUENCES, Amounts
from router.roster import Roster, columns

TERMS = ("prefill", "queue", "decode", "experts")


@dataclass(frozen=True)
class Weights:
    """One factor per term, from the configuration; 1: the time model's own word."""

    prefill: float = 1.0
    queue: float = 1.0
    decode: float = 1.0
    experts: float = 1.0

    @cached_property
    def factors(self) -> NDArray[np.float64]:
        """float64 [TERMS, 1]: what makes weighted milliseconds of seconds."""
        return 1000.0 * np.array([[self.prefill], [self.queue], [self.decode], [self.experts]])


class Scores(NamedTuple):
    """terms: float64 [TERMS, candidates] in ms, weighted; total: float64 [candidates], exactly their sum in the order of TERMS."""

    terms: NDArray[np.float64]
    total: NDArray[np.float64]


def uncached_tokens(prompt_tokens: int, overlap_blocks: NDArray[np.int64], block_size: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [candidates]: prompt tokens a rank must compute. Never below 1: the last token's logits are always computed."""
    return np.asarray(np.maximum(prompt_tokens - overlap_blocks * block_size, 1), np.int64)


def score(
    roster: Roster,
    at: NDArray[np.intp],
    load: Amounts,
    uncached: NDArray[np.int64],
    output_tokens: int,
    weights: Weights,
    remote_ranks: NDArray[np.float64] | None = None,
) -> Scores:
    """Price the candidates `at` (indices into the roster). load: int64 [AMOUNTS, candidates]; uncached: int64 [candidates].

    prefill: computing the uncached prompt. queue: prefill promised before it. decode: what the running sequences add to
    `output_tokens` steps. experts: sending each token, computed or emitted, to `remote_ranks`, float64 [candidates], the expected
    number of distinct remote ranks as far as it is believed; None: nothing is known, and the term is 0.
    """
    token_s = columns(roster.prefill_token_s, at)
    sequence_s, block_s = columns(roster.decode_sequence_s, at), columns(roster.decode_block_s, at)
    terms = np.empty((len(TERMS), len(at)))
    terms[0] = prefill_seconds(token_s, uncached)
    terms[1] = queue_seconds(token_s, load[PREFILL])
    terms[2] = decode_seconds(sequence_s, block_s, load[SEQUENCES], load[BLOCKS], output_tokens)
    terms[3] = 0.0 if remote_ranks is None else dispatch_seconds(columns(roster.dispatch_s, at), uncached + output_tokens, remote_ranks)
    terms *= weights.factors
    total = terms[0] + terms[1] + terms[2] + terms[3]
    return Scores(terms, total)
