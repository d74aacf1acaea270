"""SGLang's native /generate: requests by token ids, and its stream of answers. Pure.

Fields are those of SGLang 0.5.23. An event of the stream holds the ids of the whole answer so far, or, if the
server was started with --incremental-streaming-output, those that are new. What a stream says is not trusted:
whatever cannot be read is an `UnreadableAnswer`.
"""

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.detokenizer import TextStream
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import TokenLogprobs
from engine_adapter.serving.generation import FinishReason, ScoredToken
from engine_adapter.sglang.model_shape import SglangModel
from fleet.routings import UNKNOWN

DONE = b"[DONE]"
_MAX_SEED = (1 << 63) - 1
Scored = tuple[float | None, int, Any]
"""Log-probability, token, and its text or null."""


class UnreadableAnswer(ValueError):
    """An event that is none of SGLang's, or that contradicts the one before."""


class Finish(msgspec.Struct, frozen=True):
    """Reason of an end: stop, length or abort."""

    type: str
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """Part of an event's `meta_info`."""

    finish_reason: Finish | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    output_token_logprobs: tuple[Scored, ...] | None = None
    output_top_logprobs: tuple[tuple[Scored, ...] | None, ...] | None = None
    routed_experts: str | None = None
    """base64 of int32 [positions, all layers, k]"""


class StreamError(msgspec.Struct, frozen=True):
    """Error that ends a stream."""

    message: str = ""
    code: int | None = None


class GenerateEvent(msgspec.Struct, frozen=True):
    """One event of a stream."""

    output_ids: tuple[int, ...] = ()
    meta_info: MetaInfo = MetaInfo()
    error: StreamError | str | None = None


_DECODER = msgspec.json.Decoder(GenerateEvent)


def event_of(data: bytes) -> GenerateEvent:
    """Decode the data of an event. UnreadableAnswer says what is wrong."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableAnswer(f"no event of SGLang's: {error}") from error


def generate_body(
    request: GenerationRequest, parameters: Mapping[str, Any], *, rid: str, rank: int | None, routed: bool
) -> bytes:
    """Return the body of a request. parameters: further ones of sampling (`fields`). rank: data-parallel
    rank; None: there is only one. routed: ask for the experts of all tokens.

    Stop strings are left to the reader of the answer, which finds them also across a break."""
    sampling = request.sampling
    stated: dict[str, Any] = {
        **parameters,
        "max_new_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": request.ignore_eos,
    }
    if sampling.top_k:
        stated["top_k"] = sampling.top_k
    if sampling.temperature > 0:
        stated["sampling_seed"] = sampling.seed & _MAX_SEED
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt,
        "sampling_params": stated,
        "stream": True,
    }
    if rank is not None:
        # 0.5.23 prefers routed_dp_rank, and takes this older name, too
        body["data_parallel_rank"] = rank
    if request.salt:
        body["cache_salt"] = request.salt
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    if routed:
        body |= {"return_routed_experts": True, "routed_experts_start_len": 0}
    return msgspec.json.encode(body)


class AnswerReader:
    """Growth of one answer, from its events."""

    def __init__(
        self, request: GenerationRequest, text: TextStream, eos: Collection[int], *, incremental: bool
    ) -> None:
        """text: that of the ids emitted before. eos: ids that end an answer."""
        self.ids: list[int] = []
        """Ids of the answer, without those emitted before."""
        self.cached_tokens = 0
        self.preemptions = 0
        self.reason: FinishReason | None = None
        """Reason of the end, once it has come."""
        self._request = request
        self._text = text
        self._eos = eos
        self._incremental = incremental

    @property
    def is_over(self) -> bool:
        """True if a continuation had already ended before its stream broke."""
        request = self._request
        ended = request.emitted and not request.ignore_eos and request.prompt[-1] in self._eos
        return self._text.stopped or bool(ended)

    def take(self, event: GenerateEvent) -> tuple[list[int], str, list[ScoredToken]]:
        """Return the ids, text and log-probabilities that an event adds. `reason` is set by the last one.
        UnreadableAnswer if it contradicts the events before."""
        about = event.meta_info
        self.cached_tokens, self.preemptions = about.cached_tokens, about.num_retractions
        new, scores = self._new(event)
        tokens, text, scored = [], "", []
        for at, token in enumerate(new):
            if scores is not None:
                scored.append(ScoredToken(token, scores[at], self._text.decoded))
            tokens.append(token)
            text += self._feed(token)
            if self.reason is not None:
                break
        self.ids += tokens
        if self.reason is None and about.finish_reason is not None:
            self.reason = "stop" if about.finish_reason.type == "stop" else "length"
        return tokens, text + (self._text.finish() if self.reason and not self._text.stopped else ""), scored

    def _feed(self, token: int) -> str:
        """Return the text of the next token, and set the reason if the answer ends with it."""
        if token in self._eos and not self._request.ignore_eos:
            self.reason = "stop"
            return ""
        text = self._text.feed(token)
        if self._text.stopped:
            self.reason = "stop"
        return text

    def _new(self, event: GenerateEvent) -> tuple[Sequence[int], list[TokenLogprobs] | None]:
        ids, known = event.output_ids, 0 if self._incremental else len(self.ids)
        if len(ids) < known or len(self.ids) + len(ids) - known > self._request.max_tokens:
            raise UnreadableAnswer(
                f"{len(ids)} ids after {len(self.ids)}, of at most {self._request.max_tokens}"
            )
        new = ids[known:]
        if any(not 0 <= token < 1 << 31 for token in new):
            raise UnreadableAnswer(f"ids from {min(new)} to {max(new)}")
        if self._request.sampling.logprobs is None:
            return new, None
        return new, _scores(event.meta_info, known, len(new))


def _scores(about: MetaInfo, known: int, count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the newest `count` tokens."""
    chosen = (about.output_token_logprobs or ())[known : known + count]
    top = (about.output_top_logprobs or ())[known : known + count]
    if len(chosen) != count:
        raise UnreadableAnswer(f"{len(chosen)} log-probabilities for {count} new ids")
    return [
        TokenLogprobs(_number(one[0]), tuple((token, _number(value)) for value, token, _ in best or ()))
        for one, best in zip_longest(chosen, top)
    ]


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value


def routed_bytes(model: SglangModel, positions: int) -> int:
    """Return the characters that the experts of this number of positions take in an answer."""
    return 4 * (4 * model.all_layers * model.shape.top_k * positions // 3 + 1)


def routed_table(encoded: str, model: SglangModel, *, positions: int, cached: int) -> NDArray[np.int16]:
    """Return the chosen experts of a request: int16 [positions, layers with experts, k]. UnreadableAnswer for
    another size or for experts that the model lacks.

    positions: computed positions of the request at most. cached: those at its start that were reused from the
    KV cache; SGLang names their experts, too, but they activated none here.
    """
    shape = model.shape
    row = 4 * model.all_layers * shape.top_k
    if len(encoded) > routed_bytes(model, positions):
        raise UnreadableAnswer(f"routed experts of {len(encoded)} characters, of {positions} positions")
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableAnswer(f"routed experts are no base64: {error}") from error
    if len(content) % row:
        raise UnreadableAnswer(f"routed experts of {len(content)} bytes, no multiple of {row}")
    table = np.frombuffer(content, "<i4").reshape(-1, model.all_layers, shape.top_k)
    table = table[:, model.expert_layers, :]
    if table.size and table.max() >= shape.experts:
        raise UnreadableAnswer(f"expert {table.max()}, of {shape.experts}")
    found = np.where(table < 0, UNKNOWN, table).astype(np.int16)
    found[: min(cached, len(found))] = UNKNOWN
    return found
