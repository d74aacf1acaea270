"""Requests of a Dynamo frontend or router, as the request plane hands them to a worker: a map of token ids,
stop conditions and sampling options, in which most values may be null. Pure.

What an engine of Roost cannot do is refused by name. What only a router or a frontend acts on (annotations,
routing constraints, skip_special_tokens, stop strings) is not read: a frontend cuts answers at stop strings
itself, and then cancels the request.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from engine_adapter.batching.handed_kv import PromptKv
from engine_adapter.batching.request_validation import (
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_TEMPERATURE,
    GenerationRequest,
)
from engine_adapter.batching.sampling import Sampling
from engine_adapter.dynamo.experts import FIELD
from fleet.completions import MAX_DETAIL, shortened

KV_SOURCE = "roost_kv"
"""Key of a `PromptKv` in the `disaggregated_params` of our workers."""
DisaggregationMode = Literal["agg", "prefill", "decode"]
"""Part of requests that a worker serves, as Dynamo's own workers name it. agg: both halves."""
_Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class UnservableRequest(ValueError):
    """A request that this worker cannot serve. The text names the field and the remedy."""


class StopConditions(msgspec.Struct, frozen=True):
    """Conditions that end an answer."""

    max_tokens: int | None = None
    """None: as many as the context has room for."""
    stop_token_ids: list[_Token] | None = None
    """Tokens that end the answer and are no part of it."""
    stop_token_ids_hidden: list[_Token] | None = None
    """End tokens that the frontend read in the model card. It removes them from the answer."""
    stop_token_ids_visible: list[_Token] | None = None
    """Tokens that end the answer and stay in it."""
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class SamplingOptions(msgspec.Struct, frozen=True):
    """Options of sampling. None is the neutral value of each."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    seed: int | None = None
    guided_decoding: Any = None
    allowed_token_ids: list[_Token] | None = None
    bad_words_token_ids: list[list[_Token]] | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    """Options of the answer."""

    logprobs: int | None = None
    """Alternatives to report for each token, besides the chosen one."""
    prompt_logprobs: int | None = None


class RoutingHints(msgspec.Struct, frozen=True):
    """The router's choice, as far as it concerns the worker."""

    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    """KV is shared only with requests of the same salt."""


class PreprocessedRequest(msgspec.Struct, frozen=True):
    """The fields of Dynamo's request that a worker acts on or has to refuse."""

    token_ids: list[_Token]
    model: str = ""
    """Empty in a health probe."""
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    output_options: OutputOptions = OutputOptions()
    eos_token_ids: list[_Token] = msgspec.field(default_factory=list)
    routing: RoutingHints | None = None
    multi_modal_data: Any = None
    prompt_embeds: Any = None
    extra_args: Any = None
    """The client's `nvext`, among others."""
    prefill_result: Any = None
    encoder_result: Any = None
    bootstrap_info: Any = None

    @property
    def hints(self) -> RoutingHints:
        return self.routing or RoutingHints()

    @property
    def wants_experts(self) -> bool:
        """True if the answer should name the experts of each token."""
        nvext = _object(_object(self.extra_args).get("nvext"))
        fields = nvext.get("extra_fields")
        return isinstance(fields, list) and FIELD in fields


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class TokenStops(NamedTuple):
    """Tokens that end an answer, besides the end tokens that the engine knows."""

    shown: frozenset[int]
    """They stay in the answer, from which the frontend may remove them."""
    removed: frozenset[int]
    """They are removed from the answer."""

    def end_in(self, tokens: Sequence[int]) -> int | None:
        """Return the position of the first of them among new tokens. None: the answer continues."""
        return next(
            (at for at, token in enumerate(tokens) if token in self.shown or token in self.removed), None
        )


def parse(request: object) -> PreprocessedRequest:
    """Read a request. UnservableRequest for another form, and for what no engine of Roost can do."""
    try:
        parsed = msgspec.convert(request, PreprocessedRequest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UnservableRequest(
            f"not a request of Dynamo's form: {shortened(str(error), MAX_DETAIL)}"
        ) from error
    _refuse_features(parsed)
    return parsed


def check_role(request: PreprocessedRequest, mode: DisaggregationMode) -> None:
    """Raise UnservableRequest for the KV of another worker, where this one does not decode for others."""
    _need(
        request.prefill_result is None or mode == "decode",
        "prefill_result",
        "is for a worker that runs with --disaggregation-mode decode",
    )


def handed_kv(request: PreprocessedRequest) -> PromptKv | None:
    """Return the KV that a prefill worker of Roost has computed; None: the request has none of it."""
    result = request.prefill_result
    params = result.get("disaggregated_params") if isinstance(result, dict) else None
    stated = params.get(KV_SOURCE) if isinstance(params, dict) else None
    try:
        return None if stated is None else msgspec.convert(stated, PromptKv, strict=False)
    except msgspec.ValidationError as error:
        raise UnservableRequest(f"prefill_result: {KV_SOURCE}: {error}") from error


def generation_request(
    request: PreprocessedRequest, *, vocabulary: int, max_context: int, seed: int, decision: str = ""
) -> GenerationRequest:
    """Convert a request to the engine's form. seed: for a request without one. UnservableRequest for a value
    out of range and for a prompt that fills the context."""
    stops, options = request.stop_conditions, request.sampling_options
    prompt = request.token_ids
    room = max_context - len(prompt)
    _need(bool(prompt), "token_ids", "is empty; at least one token is needed")
    _need(
        max(prompt) < vocabulary, "token_ids", f"has the id {max(prompt)}; ids run from 0 to {vocabulary - 1}"
    )
    _need(
        room >= 1,
        "token_ids",
        f"has {len(prompt)} tokens; this model's maximum context length is {max_context} tokens, the answer"
        " included",
    )
    most = stops.max_tokens
    _need(most is None or most >= 1, "max_tokens", f"{most} is less than 1")
    salt = request.hints.cache_salt or ""
    _need(len(salt) <= MAX_SALT, "cache_salt", f"has {len(salt)} characters; at most {MAX_SALT} are allowed")
    return GenerationRequest(
        prompt=prompt,
        max_tokens=room if most is None else min(most, room),
        sampling=_sampling(options, request.output_options.logprobs, seed, vocabulary),
        ignore_eos=bool(stops.ignore_eos),
        salt=salt,
        decision=decision,
    )


def token_stops(request: PreprocessedRequest) -> TokenStops:
    """Return the tokens that end the answer. With ignore_eos, only those that the client named."""
    stops = request.stop_conditions
    hidden = frozenset(() if stops.ignore_eos else stops.stop_token_ids_hidden or ())
    shown = hidden | frozenset(stops.stop_token_ids_visible or ())
    return TokenStops(shown, frozenset(stops.stop_token_ids or ()) - shown)


def served_rank(request: PreprocessedRequest, ranks: Sequence[int]) -> int | None:
    """Return the data-parallel rank that the router chose. None: it left the choice to the worker.
    UnservableRequest when this worker does not serve that rank."""
    chosen = request.hints.dp_rank
    if chosen is not None and chosen not in ranks:
        raise UnservableRequest(
            f"dp_rank: {chosen} is not served here; this worker has the ranks {_listed(ranks)}"
        )
    return chosen


def _listed(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)} to {max(ranks)}"


def _sampling(options: SamplingOptions, logprobs: int | None, seed: int, vocabulary: int) -> Sampling:
    temperature = 1.0 if options.temperature is None else options.temperature
    top_p = 1.0 if options.top_p is None else options.top_p
    top_k = 0 if options.top_k is None else options.top_k
    _need(
        0 <= temperature <= MAX_TEMPERATURE,
        "temperature",
        f"{temperature} is outside 0 to {MAX_TEMPERATURE:g}",
    )
    _need(0 < top_p <= 1, "top_p", f"{top_p} is outside 0 (exclusive) to 1")
    _need(top_k >= -1, "top_k", f"{top_k} is negative; use 0 or -1 for no limit")
    _need(
        logprobs is None or 0 <= logprobs <= MAX_LOGPROBS,
        "logprobs",
        f"{logprobs} is outside 0 to {MAX_LOGPROBS}",
    )
    return Sampling(
        temperature=temperature,
        top_k=min(max(0, top_k), vocabulary),
        top_p=top_p,
        seed=seed if options.seed is None else options.seed,
        logprobs=logprobs,
    )


def _refuse_features(request: PreprocessedRequest) -> None:
    stops, options, hints = request.stop_conditions, request.sampling_options, request.hints
    unsupported = {
        "n": (options.n or 1) > 1,
        "best_of": (options.best_of or 1) > 1,
        "presence_penalty": bool(options.presence_penalty),
        "frequency_penalty": bool(options.frequency_penalty),
        "repetition_penalty": options.repetition_penalty not in (None, 1.0),
        "min_p": bool(options.min_p),
        "use_beam_search": bool(options.use_beam_search),
        "guided_decoding": options.guided_decoding is not None,
        "allowed_token_ids": options.allowed_token_ids is not None,
        "bad_words_token_ids": bool(options.bad_words_token_ids),
        "min_tokens": bool(stops.min_tokens),
        "max_thinking_tokens": stops.max_thinking_tokens is not None,
        "prompt_logprobs": request.output_options.prompt_logprobs is not None,
        "lora_name": hints.lora_name is not None,
        "multi_modal_data": request.multi_modal_data is not None,
        "prompt_embeds": request.prompt_embeds is not None,
        "encoder_result": request.encoder_result is not None,
        "bootstrap_info": request.bootstrap_info is not None,
    }
    found = next((name for name, given in unsupported.items() if given), None)
    if found is not None:
        raise UnservableRequest(f"{found}: engines of Roost do not have it; leave it out")


def _need(holds: bool, field: str, complaint: str) -> None:
    if not holds:
        raise UnservableRequest(f"{field}: {complaint}")
