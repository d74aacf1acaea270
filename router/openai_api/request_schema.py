"""The two requests of clients, checked field by field. Fields that are not read stay in the body and reach
foreign servers unchanged.
"""

import re
from typing import Any, NoReturn, TypeVar

import msgspec

from fleet.completions import UNREADABLE, ApiError, RankRequest, StreamOptions
from router.openai_api.unserved_fields import (
    CHAT,
    RESERVED_TEMPLATE_NAMES,
    SAMPLING,
    TEXT,
    PassedFields,
    passed,
    with_fields,
)

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
MAX_STOPS = 4
"""Same limit as OpenAI and the ranks."""
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16

_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Fields shared by both requests."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: str | int | None = None


class ChatRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`. Messages stay dictionaries, since templates may read unknown fields."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None


Request = ChatRequest | TextRequest
_Kind = TypeVar("_Kind", ChatRequest, TextRequest)


_CHAT_BODY = with_fields(ChatRequest, (*SAMPLING.neutral, *CHAT.neutral))
_TEXT_BODY = with_fields(TextRequest, (*SAMPLING.neutral, *TEXT.neutral))
"""Without the refused fields, which are not part of the documented forms."""
_TAKEN = {
    *ChatRequest.__struct_fields__,
    *TextRequest.__struct_fields__,
    *CHAT.neutral,
    *TEXT.neutral,
    *RankRequest.__struct_fields__,
}
_READ = frozenset(_TAKEN - SAMPLING.neutral.keys())
"""Fields that are never forwarded unchanged to an engine."""


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A request's generation settings with all defaults filled in, except those that depend on the prompt's
    length.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    n: int
    stop: list[str] | None
    logprobs: int | None
    ignore_eos: bool


class RequestDecoder:
    """Decoders are built once. Decoding is one pass over the body."""

    def __init__(self) -> None:
        self._chat = msgspec.json.Decoder(_CHAT_BODY)
        self._text = msgspec.json.Decoder(_TEXT_BODY)

    def chat(self, body: bytes) -> ChatRequest:
        """Decode a chat request. ApiError 400 naming the field."""
        request = _decode(self._chat, body)
        if not request.messages:
            _refuse("messages must not be empty", "messages")
        for at, message in enumerate(request.messages):
            if not isinstance(message.get("role"), str):
                _refuse(f"messages[{at}].role must be a string such as 'user'", f"messages[{at}].role")
            if not isinstance(message.get("content"), str | list | None):
                _refuse(
                    f"messages[{at}].content must be a string or a list of parts", f"messages[{at}].content"
                )
        return request

    def text(self, body: bytes) -> TextRequest:
        """Decode a completions request. ApiError 400 naming the field."""
        request = _decode(self._text, body)
        if not request.prompt:
            _refuse("prompt must not be empty", "prompt")
        return request

    def either(self, body: bytes) -> Request:
        """Decode a chat request if the body has messages, else a completions request."""
        try:
            has_messages = "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except UNREADABLE:
            has_messages = False  # the decoder below reports the error
        return self.chat(body) if has_messages else self.text(body)


def _decode(decoder: "msgspec.json.Decoder[_Kind]", body: bytes) -> _Kind:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: {error}", code="invalid_utf8") from error


def _wrong_field(complaint: str) -> ApiError:
    """Convert msgspec's message and path to an error that names the field."""
    path = _PATH.search(complaint)
    missing = _MISSING.search(complaint)
    field = path[1] if path else ""
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return ApiError(400, f"you must provide {field}", param=field, code="missing_field")
    message = _PATH.sub("", complaint)
    return ApiError(
        400,
        f"{field or 'the body'}: {message[:1].lower()}{message[1:]}",
        param=field or None,
        code="invalid_type",
    )


def _refuse(message: str, param: str, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)


def sampling(request: Request, max_choices: int, *, passes_fields: bool = False) -> SamplingSettings:
    """Check the values of a request for ranks that exchange token ids. ApiError 400 naming the field, also
    for unsupported features. passes_fields: the ranks accept fields that Roost does not read
    (`passed_fields`).
    """
    _refuse_unserved(request, passes_fields=passes_fields)
    temperature = (
        1.0 if request.temperature is None else _between(request.temperature, "temperature", 0.0, 2.0)
    )
    top_p = 1.0 if request.top_p is None else _between(request.top_p, "top_p", 0.0, 1.0)
    if top_p == 0.0:
        _refuse("top_p must be above 0 and at most 1", "top_p")
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_choices:
        _refuse(f"n must be between 1 and {max_choices}, not {n}", "n")
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        _refuse("seed must fit into 64 bits", "seed")
    return SamplingSettings(
        max_tokens=_max_tokens(request),
        temperature=temperature,
        top_p=top_p,
        top_k=_top_k(request.top_k),
        seed=request.seed,
        n=n,
        stop=None if request.stop is None else _stops(request.stop),
        logprobs=_logprobs(request),
        ignore_eos=bool(request.ignore_eos),
    )


def _between(value: float, name: str, minimum: float, maximum: float) -> float:
    if not minimum <= value <= maximum:
        _refuse(f"{name} must be between {minimum:g} and {maximum:g}, not {value:g}", name)
    return value


def _max_tokens(request: Request) -> int | None:
    name, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is not None and value < 1:
        _refuse(f"{name} must be at least 1, not {value}", name)
    return value


def _top_k(value: int | None) -> int:
    if value is None or value == -1:
        return 0
    if not 0 <= value < 2**31:
        _refuse(f"top_k must be 0 or -1 (no limit) or a positive number, not {value}", "top_k")
    return value


def _stops(stop: str | list[str]) -> list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        _refuse(f"stop may name at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    if any(not one or len(one) > MAX_STOP_CHARACTERS for one in stops):
        _refuse(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return stops or None


def _logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            _refuse("top_logprobs needs logprobs: true", "top_logprobs")
        name, value = "top_logprobs", (request.top_logprobs or 0) if request.logprobs else None
    else:
        name, value = "logprobs", request.logprobs
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        _refuse(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}", name)
    return value


def passed_fields(request: Request, body: bytes) -> PassedFields:
    """Return the fields to forward unchanged to engines that declare that they accept them."""
    return PassedFields(passed(body, _READ), binding_fields(request))


def binding_fields(request: Request) -> tuple[str, ...]:
    """Return the names of the fields that change the answer and that only engines with `passes_fields`
    serve."""
    return tuple(SAMPLING.effective_in(request))


def _refuse_unserved(request: Request, *, passes_fields: bool) -> None:
    """Refuse fields that are not served. Ignoring them silently would produce another answer than
    requested."""
    effective = (CHAT if isinstance(request, ChatRequest) else TEXT).effective_in(request)
    for name in effective or (() if passes_fields else SAMPLING.effective_in(request)):
        _refuse(
            f"{name} is not supported by the engines that serve this model", name, "unsupported_parameter"
        )
    if isinstance(request, ChatRequest):
        for name in (
            sorted(RESERVED_TEMPLATE_NAMES & request.chat_template_kwargs.keys())
            if request.chat_template_kwargs
            else ()
        ):
            _refuse(
                f"chat_template_kwargs may not set {name}",
                f"chat_template_kwargs.{name}",
                "unsupported_parameter",
            )
    elif request.best_of not in (None, 1, request.n):
        _refuse(
            "best_of is not supported by the engines that serve this model",
            "best_of",
            "unsupported_parameter",
        )


def prompts(request: TextRequest) -> list[str | list[int]]:
    """Return the prompts of a completions request: one text, several, one list of ids, or several. ApiError
    400 for anything else.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(one, str) for one in prompt):
        if not all(prompt):
            _refuse("a prompt must not be empty", "prompt")
        return prompt
    if all(_is_id(one) for one in prompt):
        return [prompt]
    if all(isinstance(one, list) and one and all(_is_id(token) for token in one) for one in prompt):
        return prompt
    _refuse(
        "prompt must be a string, a list of strings, a list of token ids (0 to 4294967295), or a list of such"
        " lists",
        "prompt",
        "invalid_type",
    )


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


def text_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Return messages whose content is text, as templates expect: parts of text are joined by line ends.
    ApiError 400 for other parts.
    """
    return [
        message if isinstance(message.get("content"), str) else {**message, "content": _flat(at, message)}
        for at, message in enumerate(request.messages)
    ]


def _flat(at: int, message: dict[str, Any]) -> str:
    parts = message.get("content") or []
    for number, part in enumerate(parts):
        field = f"messages[{at}].content[{number}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            _refuse(
                f"{field}: only parts of type 'text' can be read by the engines that serve this model",
                field,
                "unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            _refuse(f"{field}.text must be a string", f"{field}.text", "invalid_type")
    return "\n".join(part["text"] for part in parts)
