"""The course of one choice: what was asked, what has come, and what to ask of the next rank when one dies. Pure."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from fleet.completions import Choice, Completion, RankRequest, StreamOptions
from router.fleet_state.target_table import RankKey, TargetTable
from router.openai_api.request_schema import SamplingSettings
from router.openai_api.unserved_fields import NO_FIELDS, PassedFields

_USAGE = StreamOptions(include_usage=True)


class AttemptFailure(StrEnum):
    """How an attempt at a rank ended, other than with an answer."""

    CONNECT = "connect"
    """no connection could be made"""
    DISCONNECTED = "disconnected"
    """the connection closed before any answer: a dead rank, or an idle connection closed under the request"""
    SERVER_ERROR = "server_error"
    BUSY = "busy"
    """it answered 429"""
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STALLED = "stalled"
    """no further token in time"""
    BROKEN = "broken"
    """the stream ended or went bad before the answer was whole"""


class BegunAnswer(NamedTuple):
    """The weights that an answer was begun with (`EngineJoined.weights_digest`): others would change the model in mid-sentence."""

    weights: str | None


class CompletionState:
    """One choice of one request. `emitted`: ids that have come so far, in order, whoever computed them."""

    def __init__(
        self, index: int, prompt: list[int], sampling: SamplingSettings, max_tokens: int, seed: int, model: str, fields: PassedFields = NO_FIELDS
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.emitted: list[int] = []
        self.sent_text: list[str] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.failures: list[tuple[RankKey, AttemptFailure]] = []
        self.begun: BegunAnswer | None = None
        """by what its first tokens were computed; None: there are none"""
        self.fields = fields
        self._sampling = sampling
        self._seed = seed
        self._model = model

    def request(self, salt: str = "") -> RankRequest:
        """What to ask of a rank now: everything, or what is missing. At least one token is missing. salt: "" for none."""
        asked = self._sampling
        return RankRequest(
            prompt=self.prompt + self.emitted if self.emitted else self.prompt,
            model=self._model,
            max_tokens=self.max_tokens - len(self.emitted),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=self._seed,
            stop=list(asked.stop) if asked.stop else None,
            logprobs=asked.logprobs,
            ignore_eos=asked.ignore_eos,
            stream=True,
            stream_options=_USAGE,
            return_token_ids=True,
            emitted=len(self.emitted),
            cache_salt=salt or None,
        )

    def began(self, weights: str | None) -> None:
        """An attempt by an engine of these weights is over; if it brought the first tokens, others must be of the same."""
        if self.emitted and self.begun is None:
            self.begun = BegunAnswer(weights)

    def take(self, chunk: Completion) -> Choice | None:
        """Note a chunk; returns what it adds to the answer. ValueError when the rank says more than it was asked, or text without ids."""
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.cached_tokens = min(chunk.usage.prompt_tokens_details.cached_tokens, len(self.prompt))
        if not chunk.choices or self.finish_reason is not None:
            return None
        choice = chunk.choices[0]
        ids = choice.token_ids or []
        if choice.token_ids is None and choice.text:
            raise ValueError("text came without token ids, so the answer could not be continued elsewhere")
        if len(self.emitted) + len(ids) > self.max_tokens:
            raise ValueError(f"{len(self.emitted) + len(ids)} tokens came, {self.max_tokens} were asked for")
        self.emitted += ids
        if choice.text:
            self.sent_text.append(choice.text)
        self.finish_reason = choice.finish_reason
        return choice

    @property
    def exhausted(self) -> bool:
        """Every token has come but not the word that it was the last."""
        return self.finish_reason is None and len(self.emitted) >= self.max_tokens

    def finish_with(self, whole_text: str) -> Choice:
        """End an exhausted course, given the text of all its ids: what a dead rank still held back goes out now."""
        sent = "".join(self.sent_text)
        self.finish_reason = "length"
        return Choice(index=self.index, text=whole_text[len(sent) :] if whole_text.startswith(sent) else "", finish_reason="length")


def other_weights(begun: BegunAnswer, roster: TargetTable) -> dict[RankKey, str]:
    """The ranks that must not continue an answer, because their weights are not those that it was begun with, with the reason."""
    return {
        target.key: f"it serves {_named(target.engine.weights_digest)}; this answer was begun with {_named(begun.weights)}"
        for target in roster.targets
        if target.engine.weights_digest != begun.weights
    }


def _named(weights: str | None) -> str:
    return "weights that it does not name" if weights is None else f"weights {weights[:12]}"


def to_avoid(failures: Iterable[tuple[RankKey, AttemptFailure]], roster: TargetTable) -> list[frozenset[RankKey]]:
    """Ranks to avoid after these failures, strictest choice first; the caller takes the first that leaves a candidate.

    1. The failed ranks, and the whole engine of those that broke (an engine fails as a unit). 2. The failed ranks alone.
    3. Those that failed for sure: a connection that closed before any answer may have been idle for too long, and is worth one more try.
    """
    failures = list(failures)
    if not failures:
        return [frozenset()]
    failed = {rank for rank, _ in failures}
    broken = {rank[0] for rank, how in failures if how is not AttemptFailure.BUSY}
    engines = {target.key for target in roster.targets if target.key[0] in broken}
    twice = {rank for rank in failed if sum(rank == other for other, _ in failures) > 1}
    sure = {rank for rank, how in failures if how is not AttemptFailure.DISCONNECTED} | twice
    return [frozenset(failed | engines), frozenset(failed), frozenset(sure)]
