"""One routing decision: a value that can be read back, term by term. Pure; chance comes in as a number."""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.candidates import Candidates
from router.foresight import NO_GAIN, NO_KEYS, UNKNOWN_MODEL, Forecast, Keys, PredictionRecord
from router.reservations import BLOCKS, PREFILL, SEQUENCES, Amounts
from router.roster import Excluded, Roster, Target, columns
from router.scoring import Scores, Weights, score, uncached_tokens


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The request as far as its price goes. `output_tokens` is what is expected, not the limit."""

    decision_id: str
    seed: int
    """breaks ties"""
    model: str
    prompt_tokens: int
    output_tokens: int
    attempt: int = 1
    replaces: str | None = None
    """id of the decision that failed before"""
    cause: str | None = None
    """how it failed"""
    request_id: str = ""
    keys: Keys = NO_KEYS
    """hashes of who asks"""


class Outlook(NamedTuple):
    """What is foretold of a request, and what it would meet at each candidate: remote_ranks and local, float64 [candidates], are the
    expected distinct remote ranks of a token and the expected share of pairs whose expert is on the rank; prior_local is the same share
    for the traffic's mix. Where `priced`, bool [candidates], is not, they are 0 and mean nothing."""

    forecast: Forecast
    remote_ranks: NDArray[np.float64]
    local: NDArray[np.float64]
    prior_local: NDArray[np.float64]
    priced: NDArray[np.bool_]

    def of(self, at: NDArray[np.intp]) -> "Outlook":
        """For some of the candidates."""
        if len(at) == len(self.priced):
            return self
        return Outlook(self.forecast, columns(self.remote_ranks, at), columns(self.local, at), columns(self.prior_local, at), columns(self.priced, at))


@dataclass(frozen=True, slots=True)
class Decision:
    """Columns have one entry per candidate, in the roster's order. `record()` is the form for readers."""

    ask: Ask
    roster: Roster
    at: NDArray[np.intp]
    overlap_blocks: NDArray[np.int64]
    uncached: NDArray[np.int64]
    load: Amounts
    """int64 [AMOUNTS, candidates]"""
    scores: Scores
    chosen: int
    """index into the columns, as are the next two"""
    runner_up: int | None
    tied: int
    """candidates that shared the lowest score"""
    excluded: tuple[Excluded, ...]
    weights: Weights
    view_version: int
    outlook: Outlook | None
    """None: there are no prediction tables"""

    @property
    def id(self) -> str:
        return self.ask.decision_id

    @property
    def target(self) -> Target:
        return self.roster.targets[int(self.at[self.chosen])]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens the chosen rank is believed to hold already."""
        return self.ask.prompt_tokens - int(self.uncached[self.chosen])

    @property
    def margin_ms(self) -> float | None:
        if self.runner_up is None:
            return None
        return float(self.scores.total[self.runner_up] - self.scores.total[self.chosen])

    def record(self) -> "DecisionRecord":
        """The decision for readers, candidates with the lowest score first (the chosen one before its equals)."""
        order = sorted(range(len(self.at)), key=lambda at: (self.scores.total[at], at != self.chosen, at))
        return DecisionRecord(
            id=self.id,
            request_id=self.ask.request_id,
            model=self.ask.model,
            prompt_tokens=self.ask.prompt_tokens,
            expected_output_tokens=self.ask.output_tokens,
            chosen=self.target.name,
            runner_up=None if self.runner_up is None else self.roster.targets[int(self.at[self.runner_up])].name,
            margin_ms=self.margin_ms,
            tied=self.tied,
            seed=str(self.ask.seed),
            candidates=[self._candidate(at) for at in order],
            excluded=list(self.excluded),
            weights=asdict(self.weights),
            epochs=Epochs(
                placement={target.engine.engine: target.epoch for target in self.roster.targets},
                tables=None if self.outlook is None else self.outlook.forecast.tables,
                clusters=None if self.outlook is None else self.outlook.forecast.clusters,
                view=self.view_version,
            ),
            prediction=None if self.outlook is None else self.outlook.forecast.record(),
            attempt=self.ask.attempt,
            replaces=self.ask.replaces,
            cause=self.ask.cause,
        )

    def _candidate(self, at: int) -> "Candidate":
        target = self.roster.targets[int(self.at[at])]
        prefill, queue, decode, experts = (float(term) for term in self.scores.terms[:, at])
        outlook = self.outlook if self.outlook is not None and self.outlook.priced[at] else None
        return Candidate(
            engine=target.engine.engine,
            rank=target.rank,
            worker_id=str(target.key[0]),
            score_ms=float(self.scores.total[at]),
            terms_ms=Terms(prefill=prefill, queue=queue, decode=decode, experts=experts),
            overlap_blocks=int(self.overlap_blocks[at]),
            overlap_approximate=bool(self.roster.approximate[self.at[at]]),
            uncached_tokens=int(self.uncached[at]),
            load=Load(prefill_tokens=int(self.load[PREFILL, at]), requests=int(self.load[SEQUENCES, at]), blocks=int(self.load[BLOCKS, at])),
            remote_ranks=None if outlook is None else float(outlook.remote_ranks[at]),
            local_share=None if outlook is None else float(outlook.local[at]),
            experts_note=self._note(at),
        )

    def _note(self, at: int) -> str | None:
        """Why a candidate's expert term is what it is: for the engine's own reasons, or for want of a prediction worth its name."""
        note = self.roster.targets[int(self.at[at])].note
        if note is not None:
            return note
        if self.outlook is None:
            return UNKNOWN_MODEL
        if not self.outlook.priced[at]:
            return "not priced yet with the present clusters"
        return None if self.outlook.forecast.gain else NO_GAIN


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, weighted; their sum in this order is the score exactly."""

    prefill: float
    queue: float
    decode: float
    experts: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank was already promised."""

    prefill_tokens: int
    requests: int
    blocks: int


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it was priced. `worker_id` is a u64 and therefore text."""

    engine: str
    rank: int
    worker_id: str
    score_ms: float
    terms_ms: Terms
    overlap_blocks: int
    overlap_approximate: bool
    uncached_tokens: int
    load: Load
    remote_ranks: float | None
    """expected distinct remote ranks of a token, summed over MoE layers; None: not priced, `experts_note` says why"""
    local_share: float | None
    """share of the request's routed pairs that is expected to find its expert here"""
    experts_note: str | None


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of everything the decision was made with."""

    placement: dict[str, int | None]
    """by engine"""
    tables: int | None
    """prediction tables; None: there were none"""
    clusters: int | None
    view: int


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as JSON: what `GET /v1/decisions/{id}` and `POST /v1/route` answer."""

    id: str
    request_id: str
    model: str
    prompt_tokens: int
    expected_output_tokens: int
    chosen: str
    """engine/rank"""
    runner_up: str | None
    margin_ms: float | None
    tied: int
    seed: str
    candidates: list[Candidate]
    excluded: list[Excluded]
    weights: dict[str, float]
    epochs: Epochs
    prediction: PredictionRecord | None
    attempt: int
    replaces: str | None
    cause: str | None


def decide(
    ask: Ask,
    roster: Roster,
    found: Candidates,
    overlap_blocks: NDArray[np.int64],
    load: Amounts,
    weights: Weights,
    view_version: int,
    outlook: Outlook | None = None,
) -> Decision:
    """Pick the candidate that costs least; equals are told apart by `ask.seed`.

    overlap_blocks: int64 [targets]; load: int64 [AMOUNTS, targets]; outlook: of all targets. ValueError without any candidate.
    """
    if not len(found.at):
        raise ValueError(f"decision {ask.decision_id}: no candidate among {len(roster.targets)} ranks of model {ask.model!r}")
    overlap, load = columns(overlap_blocks, found.at), columns(load, found.at)
    uncached = uncached_tokens(ask.prompt_tokens, overlap, columns(roster.block_size, found.at))
    outlook = None if outlook is None else outlook.of(found.at)
    believed = None if outlook is None else outlook.forecast.gain * outlook.remote_ranks
    scores = score(roster, found.at, load, uncached, ask.output_tokens, weights, believed)
    totals = scores.total.tolist()
    best = min(totals)
    ties = [at for at, total in enumerate(totals) if total == best]
    chosen = ties[ask.seed % len(ties)]
    return Decision(
        ask=ask,
        roster=roster,
        at=found.at,
        overlap_blocks=overlap,
        uncached=uncached,
        load=load,
        scores=scores,
        chosen=chosen,
        runner_up=_best_other(totals, chosen),
        tied=len(ties),
        excluded=found.excluded,
        weights=weights,
        view_version=view_version,
        outlook=outlook,
    )


def _best_other(totals: list[float], chosen: int) -> int | None:
    return min((at for at in range(len(totals)) if at != chosen), key=totals.__getitem__, default=None)
