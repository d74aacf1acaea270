"""State of one choice: the request, the tokens so far, and the request to the next rank if a rank fails.
Pure. `router.health.attempt_failures` says which ranks may be the next.
"""

from array import array

from fleet.completions import Choice, Completion, RankRequest, StreamOptions
from router.fleet_state.target_table import RankKey
from router.health.attempt_failures import AttemptFailure, BegunAnswer
from router.openai_api.request_schema import SamplingSettings
from router.openai_api.unserved_fields import NO_FIELDS, PassedFields

_USAGE = StreamOptions(include_usage=True)


class CompletionState:
    """One choice of one request. `emitted`: ids so far, in order, from all ranks."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        sampling: SamplingSettings,
        max_tokens: int,
        seed: int,
        model: str,
        fields: PassedFields = NO_FIELDS,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.emitted = array("I")
        self.sent = bytearray()
        """text so far as UTF-8: a string per token would take ten times the memory"""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.failures: list[tuple[RankKey, AttemptFailure]] = []
        self.begun: BegunAnswer | None = None
        """weights behind its first tokens; None: no tokens yet"""
        self.fields = fields
        self._sampling = sampling
        self._seed = seed
        self._model = model

    @property
    def logprobs(self) -> int | None:
        """Number of log-probabilities per token that the client requested."""
        return self._sampling.logprobs

    def request(self, salt: str = "") -> RankRequest:
        """Return the request to send to a rank now, for all tokens or the missing ones (at least one). salt:
        "" for none.
        """
        sampling = self._sampling
        return RankRequest(
            prompt=[*self.prompt, *self.emitted] if self.emitted else self.prompt,
            model=self._model,
            max_tokens=self.max_tokens - len(self.emitted),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=self._seed,
            stop=list(sampling.stop) if sampling.stop else None,
            logprobs=sampling.logprobs,
            ignore_eos=sampling.ignore_eos,
            stream=True,
            stream_options=_USAGE,
            return_token_ids=True,
            emitted=len(self.emitted),
            cache_salt=salt or None,
        )

    def began(self, weights: str | None) -> None:
        """Record that an attempt by an engine with these weights is over. If it brought the first tokens,
        later attempts need the same weights.
        """
        if self.emitted and self.begun is None:
            self.begun = BegunAnswer(weights)

    def take(self, chunk: Completion) -> Choice | None:
        """Record a chunk and return its addition to the answer. ValueError if the rank sends more than
        requested, or text without ids.
        """
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.cached_tokens = min(chunk.usage.prompt_tokens_details.cached_tokens, len(self.prompt))
        if not chunk.choices or self.finish_reason is not None:
            return None
        choice = chunk.choices[0]
        ids = choice.token_ids or []
        if choice.token_ids is None and choice.text:
            raise ValueError("text came without token ids, so another rank could not continue the answer")
        self.add(ids, choice.text)
        self.finish_reason = choice.finish_reason
        return choice

    def add(self, ids: list[int], text: str) -> None:
        """Record tokens that are not the last ones. ValueError for more than were requested, or no ids."""
        if len(self.emitted) + len(ids) > self.max_tokens:
            raise ValueError(f"{len(self.emitted) + len(ids)} tokens came, {self.max_tokens} were requested")
        try:
            self.emitted.extend(ids)
        except OverflowError as error:
            raise ValueError("a token id is not a number of 32 bits") from error
        self.sent += text.encode("utf-8", "surrogatepass")

    @property
    def exhausted(self) -> bool:
        """True if every token has arrived, but not the finish reason."""
        return self.finish_reason is None and len(self.emitted) >= self.max_tokens

    def finish_with(self, whole_text: str) -> Choice:
        """End an exhausted choice, given the text of all its ids. Text that a dead rank still held back is
        released now.
        """
        sent = self.sent.decode("utf-8", "surrogatepass")
        self.finish_reason = "length"
        return Choice(
            index=self.index,
            text=whole_text[len(sent) :] if whole_text.startswith(sent) else "",
            finish_reason="length",
        )
