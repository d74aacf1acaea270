"""Completions API between router and ranks: request, chunk and error body, in OpenAI's format."""

from collections.abc import Mapping
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for JSON of unknown origin: not JSON or of another form, not UTF-8, nested too deeply."""
MAX_NAME, MAX_DETAIL, MAX_MESSAGE = 256, 500, 2000
"""Limits in characters for external text: names chosen by clients, error texts in logs and spans, and our own
error messages, which may quote both.
"""


def shortened(text: str, limit: int) -> str:
    """Truncate the text to `limit` characters, with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class ApiError(Exception):
    """A request that cannot be served, with the details a client needs. Becomes OpenAI's error body at an
    HTTP edge.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = shortened(message, MAX_MESSAGE)
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = None if param is None else shortened(param, MAX_NAME)
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`, derived from the status."""
        return {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    def body(self) -> bytes:
        """Encode `{"error": {"message", "type", "param", "code"}}` as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )


def context_exceeded(
    context: int, prompt_tokens: int, output_tokens: int | None, *, prompt: str, param: str
) -> ApiError:
    """Return the error for a request that exceeds the context length, in OpenAI's wording.

    Clients (LiteLLM) match this wording to retry with a model of longer context. prompt: "messages" or
    "prompt". output_tokens: as requested; None: the prompt alone is too long.
    """
    if output_tokens is None:
        detail = (
            f"your {prompt} resulted in {prompt_tokens} tokens. Please reduce the length of the {prompt}."
        )
    else:
        detail = (
            f"you requested {prompt_tokens + output_tokens} tokens ({prompt_tokens} in the {prompt},"
            f" {output_tokens} in the completion)."
        )
        detail += f" Please reduce the length of the {prompt} or completion."
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, {detail}",
        param=param,
        code="context_length_exceeded",
    )


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/completions` of a rank. A rank ignores fields that it does not read.

    `emitted` resumes a broken stream: the last `emitted` ids of `prompt` are output that the client has
    already received. They count neither as prompt nor towards `max_tokens`. Stop strings and incomplete UTF-8
    sequences are restored from them. Sampling continues at the position where it stopped (it is keyed by seed
    and position).
    """

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    """additional tokens to emit, not counting `emitted`"""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit"""
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    emitted: int = 0
    n: int = 1
    cache_salt: str | None = None
    """KV is shared only with requests that have the same salt (`Capabilities.isolates_tenants`); None: with
    those without a salt
    """


def rank_body(request: RankRequest, fields: Mapping[str, msgspec.Raw]) -> bytes:
    """Encode a rank's request as JSON, followed by the client's fields for the engine, unchanged."""
    body = _ENCODER.encode(request)
    if not fields:
        return body
    more = (b"," + _ENCODER.encode(name) + b":" + bytes(value) for name, value in fields.items())
    return body[:-1] + b"".join(more) + b"}"


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's format for completions: parallel lists over the chunk's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    """ids of exactly the tokens that this chunk adds, including those whose text is held back"""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """A complete response, or one chunk of a stream (OpenAI uses the same format for both)."""

    id: str
    model: str
    choices: list[Choice]
    created: int
    object: str = "text_completion"
    usage: Usage | None = None


DONE = b"data: [DONE]\n\n"
"""Last server-sent event of a stream."""
PROTOCOL_HEADER = "x-roost-protocol"
"""Header of a router's health check: its `fleet.event.PROTOCOL`."""
DECISION_HEADER = "x-roost-decision-id"
"""Header with the id of the routing decision: in the response to the client, and in the request to the rank,
which reports the request's activations under this id.
"""


def sse(message: Any) -> bytes:
    """Encode a message as JSON in one server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"
