"""Cost of a request on each target, in milliseconds, term by term. Pure numpy.

A term is the expected added seconds under the time model (`fleet.timing`), times a weight and 1000. Costs are
computed for all targets of a table, since ranks that cannot be chosen still step together with those that
can.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.timing import (
    dispatch_seconds,
    distinct_seconds,
    lockstep_seconds,
    own_seconds,
    prefill_seconds,
    queue_seconds,
    running_seconds,
)
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import TargetTable, columns

TERMS = ("prefill", "queue", "decode", "experts", "distinct", "lockstep", "handover")
"""Terms in the order in which they are added up."""
_FEW = 16
_ONE = np.ones((), np.int64)
"""An array, since numpy takes longer to convert a number than to compute with it."""
_PREFILL, _QUEUE, _DECODE, _EXPERTS, _DISTINCT, _LOCKSTEP, _HANDOVER = range(len(TERMS))


@dataclass(frozen=True)
class Weights:
    """One factor per term, from the configuration; 1: the unscaled time model. Field order: TERMS."""

    prefill: float = 1.0
    queue: float = 1.0
    decode: float = 1.0
    experts: float = 1.0
    distinct: float = 1.0
    lockstep: float = 1.0
    handover: float = 1.0

    def factors(self, targets: int) -> NDArray[np.float64]:
        """Return the factors from seconds to weighted milliseconds, float64 [TERMS, targets]. Cached for a
        few numbers of targets, since broadcasting a column takes longer than multiplying the full arrays.
        """
        found = self._spread.get(targets)
        if found is None:
            if len(self._spread) == _FEW:
                self._spread.clear()
            column = np.array([1000.0 * getattr(self, term) for term in TERMS])
            found = self._spread[targets] = np.repeat(column[:, None], targets, axis=1)
        return found

    @cached_property
    def _spread(self) -> dict[int, NDArray[np.float64]]:
        return {}


class ExpectedLoad(NamedTuple):
    """Expected expert load of a request, float64 [targets]: distinct remote ranks and nodes that a token must
    reach, summed over layers, and the experts that this request alone adds to each step of the engine's
    batch. gain: calibration in [0, 1] that multiplies both terms.
    """

    remote_ranks: NDArray[np.float64]
    remote_nodes: NDArray[np.float64]
    added_experts: NDArray[np.float64]
    gain: float = 1.0


class Scores(msgspec.Struct, frozen=True):
    """terms: float64 [TERMS, targets] in ms, weighted; total: float64 [targets], exactly their sum in the
    order of TERMS.

    promised: float64 [targets], seconds of outstanding work of each rank: its queue, and the time added by
    its running sequences.
    """

    terms: NDArray[np.float64]
    total: NDArray[np.float64]
    promised: NDArray[np.float64]

    def of(self, at: NDArray[np.intp]) -> "Scores":
        """Return the scores of some of the targets."""
        return Scores(columns(self.terms, at), columns(self.total, at), columns(self.promised, at))


def uncached_tokens(
    prompt_tokens: int, overlap_blocks: NDArray[np.int64], block_size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the prompt tokens a rank must compute, int64 [targets]. At least 1: the last token's logits are
    always computed.
    """
    computed: NDArray[np.int64] = np.maximum(prompt_tokens - overlap_blocks * block_size, _ONE)
    return computed


def score(
    roster: TargetTable,
    load: IntArray,
    uncached: NDArray[np.int64],
    prompt_tokens: int,
    output_tokens: int,
    weights: Weights,
    expected: ExpectedLoad | None = None,
    handover: NDArray[np.float64] | None = None,
    factors: NDArray[np.float64] | None = None,
) -> Scores:
    """Price all targets. load: int64 [AMOUNTS, targets]; uncached: int64 [targets].

    prefill: computing the uncached prompt. queue: outstanding prefill ahead of it. decode: `output_tokens`
    steps there, slowed by the running sequences. experts: sending each token, computed or emitted, to other
    ranks and nodes. distinct: reading experts for this request alone. lockstep: waiting for the engine's
    slowest rank, and making its longest prefill longer. handover: float64 [targets], seconds that a migration
    or layout switch in progress costs; None: there is none. expected None: nothing is known about the
    experts. factors: float64 [2, targets], measured over modelled speed of prefill and of decode; None: 1.
    """
    targets, output = len(uncached), float(output_tokens)
    terms = np.zeros((len(TERMS), targets))
    work, added = np.empty((2, targets)), np.empty((2, targets))
    promised, tokens = load.astype(np.float64), uncached.astype(np.float64)
    work[0] = queue_seconds(roster.prefill_token_s, promised[PREFILL])
    work[1] = running_seconds(
        roster.decode_sequence_s,
        roster.decode_block_s,
        promised[SEQUENCES],
        promised[BLOCKS],
        promised[STEPS],
        output,
    )
    added[0] = prefill_seconds(
        roster.prefill_token_s, roster.prefill_pair_s if roster.pairs else None, tokens, float(prompt_tokens)
    )
    added[1] = own_seconds(
        roster.decode_sequence_s, roster.decode_token_block_s, float(prompt_tokens + output_tokens), output
    )
    steps = output * roster.step_s
    if factors is not None:
        work *= factors
        added *= factors
        steps *= factors[1]
    terms[_PREFILL], terms[_QUEUE] = added[0], work[0]
    terms[_DECODE] = work[1] + added[1] + steps
    if expected is not None:
        tokens += output
        tokens *= expected.gain
        node_s = roster.dispatch_node_s if roster.far else None
        terms[_EXPERTS] = dispatch_seconds(
            roster.dispatch_s, node_s, tokens, expected.remote_ranks, expected.remote_nodes
        )
    if expected is not None and roster.reads:
        terms[_DISTINCT] = distinct_seconds(
            roster.expert_read_s, expected.added_experts, expected.gain * output
        )
    if roster.together is not None:
        terms[_LOCKSTEP] = lockstep_seconds(work, added, roster.group_first, roster.group)
        if roster.apart:
            terms[_LOCKSTEP] *= roster.together
    if handover is not None:
        terms[_HANDOVER] = handover
    terms *= weights.factors(targets)
    return Scores(terms, np.add.reduce(terms, axis=0), work[0] + work[1])
