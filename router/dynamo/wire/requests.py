"""Requests and answers of Dynamo's request plane: a preprocessed request, the pieces of its answer, and the
request that continues a broken answer elsewhere. Pure.

Fields that are not read here reach the worker, and the frontend, unchanged.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from router.dynamo.wire.discovery import U64
from router.dynamo.wire.malformed import UNDECODABLE, Malformed

Json = dict[str, Any]
EXPERTS = "routed_experts"
_MAX_TOKENS = 2**31
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
_INEXACT: Mapping[str, tuple[Any, ...]] = {
    "guided_decoding": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
}
"""Sampling options under which a continuation would not be exact, with the values under which it is."""


_BY_TOKEN = frozenset({"tokens", "text", "cum_log_probs", "log_probs", "top_logprobs"})
"""Fields of an item that belong to its tokens one by one."""


class AnswerLimits(msgspec.Struct, frozen=True):
    """Limits of the answer. None: not stated."""

    max_tokens: _Tokens | None = None
    min_tokens: _Tokens | None = None
    stop: Any = None
    """texts at which the frontend ends the answer"""


class RoutingConstraints(msgspec.Struct, frozen=True):
    """Labels that a worker must have."""

    required_taints: frozenset[str] | None = None


class RoutingWishes(msgspec.Struct, frozen=True):
    """Wishes of the client, or the frontend, about routing. None: nothing."""

    backend_instance_id: U64 | None = None
    decode_worker_id: U64 | None = None
    prefill_worker_id: U64 | None = None
    prefill_dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    expected_output_tokens: _Tokens | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    """cache namespace: blocks are shared only among requests with the same one"""
    allowed_worker_ids: frozenset[U64] | None = None
    routing_constraints: RoutingConstraints | None = None

    @property
    def required_taints(self) -> frozenset[str]:
        """Labels that the worker must have."""
        constraints = self.routing_constraints
        return (constraints.required_taints if constraints is not None else None) or frozenset()


class _Prompt(msgspec.Struct, frozen=True):
    token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    model: str = ""
    stop_conditions: AnswerLimits | None = None
    sampling_options: Json | None = None
    routing: RoutingWishes | None = None
    prefill_result: Any = None
    bootstrap_info: Any = None


class DynamoRequest(NamedTuple):
    """A preprocessed request. `body`: as it came."""

    body: Json
    model: str
    token_ids: list[int]
    max_tokens: int | None
    min_tokens: int | None
    hints: RoutingWishes
    wants_experts: bool
    inexact: tuple[str, ...]
    """sampling options under which no other worker could continue the answer exactly"""
    prefilled: bool
    """another router has already had its prompt computed, and says where the KV is"""
    joinable: bool
    """items of its answer may be joined. Not where the frontend looks for a text at which the answer ends: it
    would count the tokens behind it in the same item
    """


def read_request(body: Any) -> DynamoRequest:
    """Read a request. Malformed if it has no token ids, or a field of another type."""
    try:
        read = msgspec.convert(body, _Prompt)
    except UNDECODABLE as error:
        raise Malformed(f"the request cannot be read: {error}") from error
    stop, options = read.stop_conditions or AnswerLimits(), read.sampling_options or {}
    return DynamoRequest(
        body=body,
        model=read.model,
        token_ids=read.token_ids,
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        hints=read.routing or RoutingWishes(),
        wants_experts=EXPERTS in _extra_fields(body),
        prefilled=read.prefill_result is not None or read.bootstrap_info is not None,
        joinable=not stop.stop,
        inexact=tuple(name for name, exact in _INEXACT.items() if options.get(name) not in exact),
    )


def _extra_fields(body: Json) -> list[Any]:
    """Return the further fields that the client wants in its answer."""
    fields = _object(_object(body.get("extra_args")).get("nvext")).get("extra_fields")
    return fields if isinstance(fields, list) else []


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def worker_request(
    request: DynamoRequest, worker_id: int, dp_rank: int | None, emitted: Sequence[int], *, experts: bool
) -> Json:
    """Return the request for a worker: for the whole answer, or for what is missing after `emitted`.

    dp_rank: None where the worker has one rank. experts: ask for the experts of each token.
    """
    body = dict(request.body)
    hints = dict(body.get("routing") or {}) | {"backend_instance_id": worker_id}
    if dp_rank is not None:
        hints["dp_rank"] = dp_rank
    body["routing"] = hints
    if emitted:
        body["token_ids"] = [*request.token_ids, *emitted]
        stop = dict(body.get("stop_conditions") or {})
        if request.max_tokens is not None:
            stop["max_tokens"] = request.max_tokens - len(emitted)
        if request.min_tokens is not None:
            stop["min_tokens"] = max(0, request.min_tokens - len(emitted))
        body["stop_conditions"] = stop
    if experts and not request.wants_experts:
        extra = _object(body.get("extra_args"))
        wanted = {"extra_fields": [*_extra_fields(request.body), EXPERTS]}
        body["extra_args"] = extra | {"nvext": _object(extra.get("nvext")) | wanted}
    return body


class AnswerPiece(NamedTuple):
    """One item of a worker's stream. `item`: for the frontend."""

    item: Json
    token_ids: list[int]
    finished: bool
    failure: str | None
    """why the worker gave up; None: it did not"""
    experts: Any
    """experts of the tokens, in the worker's own encoding; None: not in this piece"""
    cached_tokens: int | None


def read_piece(item: Any, emitted: int, prompt_tokens: int, *, wants_experts: bool) -> AnswerPiece:
    """Read an item of a worker's stream. Malformed if it is no item.

    emitted: tokens of the answer that earlier workers produced; the worker counts them as part of the prompt,
    and the usage it states is corrected. prompt_tokens: of the client's own prompt. wants_experts: False
    removes the experts from the item.
    """
    if not isinstance(item, dict):
        raise Malformed(f"a worker sent {item!r:.100} instead of an object")
    token_ids = item.get("token_ids")
    token_ids = [] if token_ids is None else token_ids
    if not isinstance(token_ids, list):
        raise Malformed(f"a worker sent the token ids {token_ids!r:.100}")
    for one in token_ids:
        if type(one) is not int or one < 0:
            raise Malformed(f"a worker sent the token ids {token_ids!r:.100}")
    reason, usage = item.get("finish_reason"), item.get("completion_usage")
    experts, data = None, item.get("engine_data")
    if isinstance(data, dict) and EXPERTS in data:
        experts = data[EXPERTS]
        if not wants_experts:
            left = {name: value for name, value in data.items() if name != EXPERTS}
            item = item | {"engine_data": left or None}
    if reason is None and usage is None:  # most items
        return AnswerPiece(item, token_ids, False, None, experts, None)
    if emitted and isinstance(usage, dict):
        item = item | {"completion_usage": _whole_usage(usage, emitted, prompt_tokens)}
    return AnswerPiece(
        item, token_ids, reason is not None, _failure(reason), experts, _cached(usage, prompt_tokens)
    )


def take_joined(pieces: deque[AnswerPiece]) -> AnswerPiece:
    """Remove the first piece, and those after it that can go into one item with it. Return that item.

    Every item costs router and frontend several switches between threads, however many tokens it has.
    """
    piece = pieces.popleft()
    if not pieces or not _joins(piece, pieces[0]):
        return piece
    token_ids = list(piece.token_ids)
    while pieces and _joins(piece, pieces[0]):
        piece = pieces.popleft()
        token_ids += piece.token_ids
    return piece._replace(item={**piece.item, "token_ids": token_ids}, token_ids=token_ids)


def _joins(one: AnswerPiece, following: AnswerPiece) -> bool:
    """Return True if the item of a piece says nothing but its tokens, and what the following item says too,
    whose fields do not belong to single tokens.
    """
    if one.experts is not None:
        return False
    after = following.item
    for name, value in one.item.items():
        if name != "token_ids" and value is not None:
            same = isinstance(value, str | int) and name not in _BY_TOKEN and value == after.get(name)
            if not same or name == "finish_reason":
                return False
    return all(after.get(name) is None for name in _BY_TOKEN)


def _failure(reason: Any) -> str | None:
    """Return the failure in a finish reason: {"error": text}, or a plain "error"."""
    if isinstance(reason, dict):
        return str(reason.get("error", reason))
    return reason if isinstance(reason, str) and reason.startswith("error") else None


def _whole_usage(usage: Json, emitted: int, prompt_tokens: int) -> Json:
    """Return the usage of the whole answer, given that of its last part."""
    completion = usage.get("completion_tokens")
    total = completion + emitted if isinstance(completion, int) else emitted
    return usage | {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": total,
        "total_tokens": prompt_tokens + total,
    }


def _cached(usage: Any, prompt_tokens: int) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return min(cached, prompt_tokens) if isinstance(cached, int) and cached >= 0 else None


def length_item() -> Json:
    """Return the item that ends an answer whose tokens have all arrived, but whose worker died before it said
    so.
    """
    return {"token_ids": [], "finish_reason": "length"}


def error_item(message: str) -> Json:
    """Return the item that tells the frontend of a failure."""
    return {"token_ids": [], "finish_reason": {"error": message}}
