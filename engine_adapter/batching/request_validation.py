"""Validation of HTTP requests to a rank: bytes to `RankRequest` to `GenerationRequest`. Each error names the
field and the remedy. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from engine_adapter.batching.handed_kv import PromptKv
from engine_adapter.batching.sampling import GREEDY, Sampling
from fleet.completions import ApiError, RankRequest, context_exceeded

MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_SALT = 1024
"""Characters of `cache_salt`."""
MAX_TEMPERATURE = 2.0
DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens`. This value, stated or not, is clipped to the context instead of rejected."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_DECODER = msgspec.json.Decoder(RankRequest)
_PLACE = re.compile(r" - at `\$\.?([^`\[]*).*`$")
"""Location in msgspec's error messages: the field, without positions inside a list."""
_DECISION = re.compile(r"[ -~]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Token IDs in, at most `max_tokens` further IDs out."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    emitted: int = 0
    """Number of IDs at the end of `prompt` that are output which a client has already seen. Above 0, the
    request is a continuation."""
    decision: str = ""
    """ID of the routing decision that sent the request here."""
    salt: str = ""
    """KV is shared only with requests of the same salt."""
    hands_over: bool = False
    """Another engine will decode: the answer says where the KV of the prompt is."""
    kv: PromptKv | None = None
    """KV of the prompt, which another engine has computed."""
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS)
    """Fields of the request that Roost does not read, for an engine that takes them
    (`Capabilities.passes_fields`)."""

    def check_bounds(self, *, max_context: int, vocabulary: int) -> None:
        """ValueError for a request that no rank of these bounds can serve."""
        known = len(self.prompt)
        if not known or self.max_tokens < 1 or known + self.max_tokens > max_context:
            raise ValueError(
                f"request of {known} ids and {self.max_tokens} to generate: at least 1 and 1 are needed,"
                f" {max_context} in all fit (max_context)"
            )
        if not 0 <= self.emitted < known:
            raise ValueError(
                f"request with {self.emitted} emitted ids of {known}: at least one id of the prompt must be"
                " the client's own"
            )
        if min(self.prompt) < 0 or max(self.prompt) >= vocabulary:
            raise ValueError(f"request with an id outside 0..{vocabulary - 1}")


def parse(body: bytes) -> RankRequest:
    """Decode a request body. ApiError 400 for invalid JSON, invalid UTF-8, or wrong types."""
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        raise ApiError(
            400, _PLACE.sub("", str(error)), param=place.group(1) or None if place else None
        ) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON in UTF-8: {error}") from error


def unread_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a body that `RankRequest` lacks. A null requests nothing, and is left out. body:
    was parsed before."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    known = RankRequest.__struct_fields__
    return {name: value for name, value in found.items() if value is not None and name not in known}


def check(request: RankRequest, model: str) -> None:
    """Check everything that does not depend on the tokenized prompt. ApiError 404 for another model, 400 for
    a value out of range."""
    if request.model is not None and request.model != model:
        raise ApiError(
            404,
            f"the model {request.model!r} is not served here; this rank serves {model!r}",
            code="model_not_found",
            param="model",
        )
    _need(bool(request.prompt), "prompt", "is empty; at least one token is needed")
    _need(request.max_tokens >= 1, "max_tokens", f"{request.max_tokens} is less than 1")
    _need(
        0 <= request.temperature <= MAX_TEMPERATURE,
        "temperature",
        f"{request.temperature} is outside 0 to {MAX_TEMPERATURE:g}",
    )
    _need(0 < request.top_p <= 1, "top_p", f"{request.top_p} is outside 0 (exclusive) to 1")
    _need(request.top_k >= -1, "top_k", f"{request.top_k} is negative; use 0 for no limit")
    _need(request.n == 1, "n", f"{request.n}: a rank answers once; send several requests")
    _need(
        request.logprobs is None or 0 <= request.logprobs <= MAX_LOGPROBS,
        "logprobs",
        f"{request.logprobs} is outside 0 to {MAX_LOGPROBS}",
    )
    stops = stop_strings(request)
    _need(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} strings; at most {MAX_STOPS} are allowed")
    _need(all(stops), "stop", "holds an empty string, which would stop everything")
    _need(
        request.cache_salt != "",
        "cache_salt",
        "is empty; leave it out to share KV with requests that have none",
    )
    _need(
        len(request.cache_salt or "") <= MAX_SALT,
        "cache_salt",
        f"has {len(request.cache_salt or '')} characters; at most {MAX_SALT} are allowed",
    )
    known = len(request.prompt) if isinstance(request.prompt, list) else 1
    _need(
        0 <= request.emitted < known,
        "emitted",
        f"{request.emitted}: at least one id of a token-id prompt must be the client's own",
    )


def stop_strings(request: RankRequest) -> tuple[str, ...]:
    """Return the stop strings as a tuple."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def decision_id(header: str | None) -> str:
    """Return the routing decision ID of a request: 1 to 64 printable ASCII characters. Anything else counts
    as no decision and gives the empty string."""
    return header if header is not None and _DECISION.fullmatch(header) else ""


def generation_request(
    request: RankRequest,
    prompt: list[int],
    *,
    vocabulary: int,
    max_context: int,
    seed: int,
    decision: str = "",
    fields: Mapping[str, Any] = NO_FIELDS,
) -> GenerationRequest:
    """Convert a checked request to the engine's form. ApiError 400 for IDs out of vocabulary and for a
    request that exceeds the context."""
    _need(bool(prompt), "prompt", "has no tokens; at least one is needed")
    worst = next((token for token in (min(prompt), max(prompt)) if not 0 <= token < vocabulary), None)
    _need(worst is None, "prompt", f"has the id {worst}; ids run from 0 to {vocabulary - 1}")
    room = max_context - len(prompt)
    max_tokens = request.max_tokens
    if max_tokens > room and max_tokens == DEFAULT_MAX_TOKENS and room >= 1:
        max_tokens = room
    if max_tokens > room:
        fits = room >= 1
        raise context_exceeded(
            max_context,
            len(prompt),
            max_tokens if fits else None,
            prompt="prompt",
            param="max_tokens" if fits else "prompt",
        )
    return GenerationRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=request.temperature,
            top_k=min(max(0, request.top_k), vocabulary),
            top_p=request.top_p,
            seed=seed if request.seed is None else request.seed,
            logprobs=request.logprobs,
        ),
        stop=stop_strings(request),
        ignore_eos=request.ignore_eos,
        emitted=request.emitted,
        decision=decision,
        salt=request.cache_salt or "",
        fields=fields,
    )


def _need(holds: bool, field: str, complaint: str) -> None:
    if not holds:
        raise ApiError(400, f"{field}: {complaint}", param=field)
