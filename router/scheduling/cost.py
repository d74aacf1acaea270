"""Cost of a request on each target, in milliseconds, term by term. Pure numpy.

A term is the expected added seconds under the time model (`fleet.timing`), times a weight and 1000.
COST_TERMS lists them: a new term is a function, its row there, and the setting `<name>_weight`. Costs are
computed for all targets of a table, since ranks that cannot be chosen still step together with those that
can.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray
from fleet.timing import (
    dispatch_seconds,
    distinct_seconds,
    lockstep_seconds,
    own_seconds,
    prefill_seconds,
    queue_seconds,
    running_seconds,
)
from router import kernels
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import TargetTable, columns
from router.scheduling.speed_correction import DECODE_SPEED, PREFILL_SPEED

_NO_TOKENS = np.zeros(())


class ExpectedLoad(msgspec.Struct, frozen=True, eq=False):
    """Expected expert load of a request, as of `PriceList.of`. gain: calibration in [0, 1] that multiplies
    both terms.
    """

    expert_load: FloatArray
    """[4, targets]"""
    gain: float = 1.0

    @classmethod
    def of(
        cls, remote_ranks: FloatArray, remote_nodes: FloatArray, added_experts: FloatArray, gain: float = 1.0
    ) -> "ExpectedLoad":
        """Build it from its parts, float64 [targets]; no cost depends on the local share."""
        return cls(np.stack([remote_ranks, remote_nodes, np.zeros_like(remote_ranks), added_experts]), gain)

    @property
    def remote_ranks(self) -> FloatArray:
        """Distinct remote ranks that a token must reach, summed over layers, float64 [targets]."""
        row: FloatArray = self.expert_load[0]
        return row

    @property
    def remote_nodes(self) -> FloatArray:
        """The same of nodes."""
        row: FloatArray = self.expert_load[1]
        return row

    @property
    def added_experts(self) -> FloatArray:
        """Experts that this request alone adds to each step of the engine's batch, float64 [targets]."""
        row: FloatArray = self.expert_load[3]
        return row


class RequestWork(msgspec.Struct, frozen=True, gc=False):
    """Work of one request at each target, from which the terms are computed. Arrays are [targets]; where
    several requests are priced at once (`batch_assignment`), [targets, requests]. Seconds are corrected by
    the measured speeds.
    """

    target_table: TargetTable
    outstanding: FloatArray
    """[2, ...]: outstanding prefill of each rank, and what its sequences add to the request's steps"""
    added: FloatArray
    """[2, ...]: the request's own prefill, and what it adds to the steps"""
    with_request: FloatArray
    """[2, ...]: the sum of both"""
    longest: FloatArray | None
    """[2, ...]: the largest `outstanding` of the engine's ranks; None: no ranks step together"""
    in_lockstep: FloatArray | None
    """1 where an engine's ranks step together, 0 elsewhere; None: 1"""
    steps: FloatArray | float = 0.0
    """fixed part of the request's steps"""
    uncached: FloatArray = _NO_TOKENS
    """prompt tokens to compute"""
    output: float = 0.0
    """expected output tokens"""
    expected: ExpectedLoad | None = None
    switch_delay: FloatArray | None = None
    """seconds that a migration or layout switch in progress costs at each target, the `handover` term;
    None: there is none
    """
    transfer: FloatArray | None = None
    """seconds to fetch the KV of a prompt that another rank has computed; None: there is none to fetch"""


class CostTerm(NamedTuple):
    """One summand of the cost. seconds: of a request at each target; None: there are none. speed: row of the
    measured speeds behind the term; None: it depends on neither. by_load: the term depends on the load of the
    ranks, so that every assignment of a batch changes it.
    """

    name: str
    seconds: Callable[[RequestWork], FloatArray | None]
    speed: int | None = None
    by_load: bool = False


def _prefill(work: RequestWork) -> FloatArray:
    """Compute the uncached prompt, or fetch it from the rank that has computed it."""
    seconds: FloatArray = work.added[PREFILL_SPEED]
    return seconds if work.transfer is None else seconds + work.transfer


def _queue(work: RequestWork) -> FloatArray:
    """Wait for the outstanding prefill ahead of it."""
    seconds: FloatArray = work.outstanding[PREFILL_SPEED]
    return seconds


def _decode(work: RequestWork) -> FloatArray:
    """Take the output's steps there, slowed by the running sequences."""
    seconds: FloatArray = work.with_request[DECODE_SPEED] + work.steps
    return seconds


def _experts(work: RequestWork) -> FloatArray | None:
    """Send each token, computed or emitted, to other ranks and nodes."""
    if work.expected is None:
        return None
    target_table, expected = work.target_table, work.expected
    tokens = (work.uncached + work.output) * expected.gain
    node_s = target_table.dispatch_node_s if target_table.far else None
    return dispatch_seconds(
        target_table.dispatch_s, node_s, tokens, expected.remote_ranks, expected.remote_nodes
    )


def _distinct(work: RequestWork) -> FloatArray | None:
    """Read experts for this request alone."""
    if work.expected is None or not work.target_table.reads:
        return None
    tokens = work.expected.gain * work.output
    return distinct_seconds(work.target_table.expert_read_s, work.expected.added_experts, tokens)


def _sharded(work: RequestWork) -> FloatArray | None:
    """Share each token with all ranks in sharded layers, and bring back their sums."""
    if not work.target_table.gathers:
        return None
    seconds: FloatArray = (work.uncached + work.output) * work.target_table.gather_token_s
    return seconds


def _lockstep(work: RequestWork) -> FloatArray | None:
    """Wait for the engine's slowest rank, and make its longest prefill longer."""
    if work.longest is None:
        return None
    seconds = lockstep_seconds(work.with_request, work.longest)
    return seconds if work.in_lockstep is None else seconds * work.in_lockstep


def _switch_delay(work: RequestWork) -> FloatArray | None:
    """Wait for a migration or layout switch in progress."""
    return work.switch_delay


COST_TERMS = (
    CostTerm("prefill", _prefill, PREFILL_SPEED),
    CostTerm("queue", _queue, PREFILL_SPEED, by_load=True),
    CostTerm("decode", _decode, DECODE_SPEED, by_load=True),
    CostTerm("experts", _experts),
    CostTerm("distinct", _distinct),
    CostTerm("sharded", _sharded),
    CostTerm("lockstep", _lockstep, DECODE_SPEED, by_load=True),
    CostTerm("handover", _switch_delay),
)
"""In the order in which they are added up."""
TERMS = tuple(term.name for term in COST_TERMS)
_SECONDS = tuple(term.seconds for term in COST_TERMS)


@dataclass(frozen=True)
class Weights:
    """One factor per term, from the configuration; 1: the unscaled time model."""

    by_term: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 1.0))

    @classmethod
    def of(cls, **by_term: float) -> "Weights":
        """Return these weights; terms that are not named weigh 1."""
        return cls(dict.fromkeys(TERMS, 1.0) | by_term)

    def without(self, terms: Iterable[str]) -> "Weights":
        """Return the weights with these terms at 0."""
        return Weights({**self.by_term, **dict.fromkeys(terms, 0.0)})

    @cached_property
    def factors(self) -> FloatArray:
        """Factors from seconds to weighted milliseconds, float64 [TERMS]."""
        return np.array([1000.0 * self.by_term[term] for term in TERMS])


class Scores(msgspec.Struct, frozen=True):
    """Prices of targets, in one matrix: an array of its own for each row would cost more than to price."""

    rows: FloatArray
    """[TERMS + 2, targets]"""

    @property
    def terms(self) -> FloatArray:
        """Weighted ms, float64 [TERMS, targets]."""
        rows: FloatArray = self.rows[:-2]
        return rows

    @property
    def total(self) -> FloatArray:
        """Exactly the sum of the terms in the order of TERMS, float64 [targets]."""
        row: FloatArray = self.rows[-2]
        return row

    @property
    def outstanding(self) -> FloatArray:
        """Seconds of outstanding work of each rank: its queue, and the time added by its running sequences,
        float64 [targets].
        """
        row: FloatArray = self.rows[-1]
        return row

    def ms(self, term: str) -> FloatArray:
        """Return one term, float64 [targets]."""
        return np.asarray(self.terms[TERMS.index(term)])

    def of(self, at: NDArray[np.intp]) -> "Scores":
        """Return the scores of some of the targets."""
        return Scores(columns(self.rows, at))


def uncached_tokens(
    prompt_tokens: int, overlap_blocks: NDArray[np.int64], block_size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the prompt tokens a rank must compute, int64 [targets]. At least 1: the last token's logits are
    always computed.
    """
    library = kernels.compiled()
    if library is None:
        return np.asarray(np.maximum(prompt_tokens - overlap_blocks * block_size, 1), np.int64)
    computed = np.empty(len(overlap_blocks), np.int64)
    library.uncached(len(computed), prompt_tokens, overlap_blocks, block_size, computed)
    return computed


def outstanding_seconds(
    token_s: FloatArray,
    sequence_s: FloatArray,
    block_s: FloatArray,
    load: FloatArray,
    output: float | IntArray,
    out: FloatArray,
) -> None:
    """Compute `RequestWork.outstanding` of a load [AMOUNTS, ...] into `out`, float64 [2, ...]."""
    out[PREFILL_SPEED] = queue_seconds(token_s, load[PREFILL])
    out[DECODE_SPEED] = running_seconds(
        sequence_s, block_s, load[SEQUENCES], load[BLOCKS], load[STEPS], output
    )


def score(
    target_table: TargetTable,
    load: IntArray,
    uncached: NDArray[np.int64],
    prompt_tokens: int,
    output_tokens: int,
    weights: Weights,
    expected: ExpectedLoad | None = None,
    switch_delay: NDArray[np.float64] | None = None,
    factors: NDArray[np.float64] | None = None,
    transfer: FloatArray | None = None,
) -> Scores:
    """Price all targets: the weighted terms of COST_TERMS, and their sum.

    load: int64 [AMOUNTS, targets]; uncached: int64 [targets]. switch_delay: float64 [targets], seconds that a
    migration or layout switch in progress costs; None: there is none. expected None: nothing is known about
    the experts. factors: float64 [2, targets], measured over modelled speed of prefill and of decode; None:
    1. transfer: float64 [targets], as in `RequestWork`.
    """
    library = kernels.compiled()
    if library is not None and library.TERMS == TERMS:
        return _compiled_score(
            library,
            target_table,
            load,
            uncached,
            prompt_tokens,
            output_tokens,
            weights,
            expected,
            switch_delay,
            factors,
            transfer,
        )
    work = _work(
        target_table, load, uncached, prompt_tokens, output_tokens, expected, switch_delay, factors, transfer
    )
    scores = Scores(np.zeros((len(COST_TERMS) + 2, len(uncached))))
    terms = scores.terms
    for row, seconds_of in enumerate(_SECONDS):
        seconds = seconds_of(work)
        if seconds is not None:
            terms[row] = seconds
    terms *= weights.factors[:, None]
    scores.total[:] = reduce(np.add, terms)
    scores.outstanding[:] = work.outstanding[0] + work.outstanding[1]
    return scores


def _work(
    target_table: TargetTable,
    load: IntArray,
    uncached: NDArray[np.int64],
    prompt_tokens: int,
    output_tokens: int,
    expected: ExpectedLoad | None,
    switch_delay: FloatArray | None,
    factors: FloatArray | None,
    transfer: FloatArray | None,
) -> RequestWork:
    """Return what the ranks have to do without the request, and what it adds."""
    targets, output = len(uncached), float(output_tokens)
    tokens = uncached.astype(np.float64)
    outstanding, added = np.empty((2, targets)), np.empty((2, targets))
    outstanding_seconds(
        target_table.prefill_token_s,
        target_table.decode_sequence_s,
        target_table.decode_block_s,
        load.astype(np.float64),
        output,
        outstanding,
    )
    added[PREFILL_SPEED] = prefill_seconds(
        target_table.prefill_token_s,
        target_table.prefill_pair_s if target_table.pairs else None,
        tokens,
        float(prompt_tokens),
    )
    added[DECODE_SPEED] = own_seconds(
        target_table.decode_sequence_s,
        target_table.decode_token_block_s,
        float(prompt_tokens + output_tokens),
        output,
    )
    steps = output * target_table.step_s
    if factors is not None:
        outstanding *= factors
        added *= factors
        steps *= factors[DECODE_SPEED]
    longest = None
    if target_table.in_lockstep is not None:
        longest = np.maximum.reduceat(outstanding.reshape(-1), target_table.group_first).take(
            target_table.group
        )
    in_lockstep = target_table.in_lockstep if target_table.apart else None
    return RequestWork(
        target_table,
        outstanding,
        added,
        outstanding + added,
        longest,
        in_lockstep,
        steps,
        tokens,
        output,
        expected,
        switch_delay,
        transfer,
    )


def _compiled_score(
    library: kernels.DecisionKernels,
    target_table: TargetTable,
    load: IntArray,
    uncached: NDArray[np.int64],
    prompt_tokens: int,
    output_tokens: int,
    weights: Weights,
    expected: ExpectedLoad | None,
    switch_delay: FloatArray | None,
    factors: FloatArray | None,
    transfer: FloatArray | None,
) -> Scores:
    """Compute `score` in C, with the same bits."""
    targets, first = len(uncached), target_table.first
    priced = np.empty((len(TERMS) + 2, targets))
    library.price(
        targets,
        len(first),
        prompt_tokens,
        output_tokens,
        0.0 if expected is None else expected.gain,
        target_table.pairs,
        target_table.far,
        target_table.reads,
        target_table.gathers,
        target_table.apart,
        target_table.speeds,
        load,
        uncached,
        first if target_table.in_lockstep is not None else None,
        factors,
        None if expected is None else expected.expert_load,
        switch_delay,
        transfer,
        weights.factors,
        priced,
    )
    return Scores(priced)
