"""Lenient reading of the few fields of a client's body that routing uses. No request is refused: an
unreadable field is simply not priced. Pure.

The server validates its own requests. Numbers and booleans are read as leniently as vLLM and SGLang
(pydantic's lax mode) do.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleet.completions import UNREADABLE

MAX_PARTS = 64
"""Most parts of a multipart body that are examined."""
MAX_FIELD_BYTES = 1024
"""A longer text field of a multipart body cannot be a model's name."""
_PART_HEAD_BYTES = 4096
_MAX_TOKENS = 2**31
"""Beyond any context length."""
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_NOTHING = msgspec.Raw(b"")


class LenientRequest(msgspec.Struct, frozen=True):
    """The fields of a request that routing reads; None, False or b"" for a field that is absent or
    unreadable.
    """

    model: str | None = None
    stream: bool = False
    max_tokens: int | None = None
    prompt: bytes = b""
    """Beginning of the server's prompt, as stable bytes. Used only to estimate prefix overlap."""
    user: str | None = None
    session: str | None = None
    priority: str | int | None = None
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    refers_to: str | None = None
    """id of an object of an earlier answer, known only to its server"""
    is_chat: bool = False
    """True if it has messages; otherwise it is treated as a completions body"""
    prompt_bytes: int | None = None
    """length of the entire prompt if `prompt` holds only its beginning"""


class _Message(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None


class _Usual(msgspec.Struct, frozen=True):
    """The fields that are read, in the types that clients usually send. Read in one pass, several times
    faster than field by field.
    """

    model: str | None = None
    stream: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: list[_Message] | msgspec.UnsetType = msgspec.UNSET
    prompt: str | None = None
    input: str | None = None
    query: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: str | int | None = None
    temperature: float | None = None
    top_p: float | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    input_file_id: str | None = None


_USUAL: msgspec.json.Decoder[_Usual] = msgspec.json.Decoder(_Usual)
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(body: bytes, content_type: str) -> LenientRequest:
    """Read a JSON body, or the text fields of a multipart body. Never raises."""
    if content_type.lower().startswith("multipart/"):
        return _of_parts(body, content_type)
    try:
        return _as_usual(_USUAL.decode(body))
    except UNREADABLE:
        return _leniently(body)


def _as_usual(fields: _Usual) -> LenientRequest:
    messages = [] if fields.messages is msgspec.UNSET else fields.messages
    texts = [f"{message.role or ''}\n{message.content or ''}\n" for message in messages]
    texts += fields.prompt or "", fields.query or "", fields.input or ""
    max_tokens = None
    for limit in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        if limit is not None and limit >= 1:
            max_tokens = min(limit, _MAX_TOKENS)
            break
    return LenientRequest(
        model=fields.model or None,
        stream=bool(fields.stream),
        max_tokens=max_tokens,
        prompt=b"".join(
            (
                fields.tools,
                fields.system,
                fields.instructions,
                "".join(texts).encode("utf-8", "surrogatepass"),
            )
        ),
        user=fields.user or fields.safety_identifier or None,
        session=fields.prompt_cache_key or None,
        priority=fields.priority,
        temperature=None if fields.temperature is None else _number(fields.temperature),
        top_p=None if fields.top_p is None else _number(fields.top_p),
        cache_salt=fields.cache_salt or None,
        refers_to=fields.previous_response_id or fields.input_file_id or None,
        is_chat=fields.messages is not msgspec.UNSET,
    )


def _leniently(body: bytes) -> LenientRequest:
    """Read each field separately, so that an unreadable field does not affect others."""
    try:
        fields = _FIELDS.decode(body)
    except UNREADABLE:
        return LenientRequest()

    def value(name: str) -> Any:
        return _value(fields.get(name, _NOTHING))

    def first(*names: str) -> str | None:
        texts = (value(name) for name in names)
        return next((text for text in texts if isinstance(text, str) and text), None)

    limits = (_count(value(name)) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    priority = value("priority")
    return LenientRequest(
        model=first("model"),
        stream=_truth(value("stream")),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        prompt=_prompt(fields),
        user=first("user", "safety_identifier"),
        session=first("prompt_cache_key"),
        priority=priority if isinstance(priority, str) or type(priority) is int else None,
        temperature=_number(value("temperature")),
        top_p=_number(value("top_p")),
        cache_salt=first("cache_salt"),
        refers_to=first("previous_response_id", "input_file_id"),
        is_chat="messages" in fields,
    )


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if len(bytes(raw)) else None
    except UNREADABLE:
        return None


def _number(value: Any) -> float | None:
    """Read a number, or a string that contains one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> int | None:
    """Read a count, clipped to 1.._MAX_TOKENS."""
    number = _number(value)
    return None if number is None or number < 1 else min(int(number), _MAX_TOKENS)


def _truth(value: Any) -> bool:
    return value.strip().lower() in _TRUE if isinstance(value, str) else value in (1, True)


def _prompt(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """Join the parts of the prompt in the order in which chat templates render them: tools and system prompt
    first.
    """
    parts = [bytes(fields.get(name, b"")) for name in ("tools", "system", "instructions")]
    messages = _value(fields.get("messages", _NOTHING))
    if isinstance(messages, list):
        parts += map(_message, messages)
    parts += [_plain(_value(fields.get(name, _NOTHING))) for name in ("prompt", "query", "input")]
    return b"".join(parts)


def _message(message: Any) -> bytes:
    if not isinstance(message, dict):
        return _plain(message)
    return _plain(message.get("role")) + b"\n" + _plain(message.get("content")) + b"\n"


def _plain(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else msgspec.json.encode(value)


# Multipart


def _of_parts(body: bytes, content_type: str) -> LenientRequest:
    """Read the text fields `model` and `stream` of an upload of audio, images or files."""
    fields = dict(_text_fields(body, _boundary(content_type), ("model", "stream")))
    return LenientRequest(model=fields.get("model") or None, stream=_truth(fields.get("stream", "")))


def _boundary(content_type: str) -> bytes:
    """Return the multipart boundary, or b""."""
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "boundary":
            return value.strip().strip('"').encode("latin-1", "replace")
    return b""


def _text_fields(body: bytes, boundary: bytes, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return short text fields with one of the names, among the first parts. Files are skipped by search, not
    copied.
    """
    found: list[tuple[str, str]] = []
    if not boundary:
        return found
    delimiter = b"--" + boundary
    start = body.find(delimiter)
    for _ in range(MAX_PARTS):
        end = -1 if start < 0 else body.find(b"\r\n" + delimiter, start + len(delimiter))
        if end < 0:
            break
        head_end = body.find(b"\r\n\r\n", start, start + _PART_HEAD_BYTES)
        if head_end >= 0 and end - head_end - 4 <= MAX_FIELD_BYTES:
            name = _part_name(body[start:head_end])
            if name in names:
                found.append((name, body[head_end + 4 : end].decode("utf-8", "replace").strip()))
        start = end + 2
    return found


def _part_name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:"):
            for parameter in line.split(b";")[1:]:
                name, _, value = parameter.strip().partition(b"=")
                if name.lower() == b"name":
                    return value.strip().strip(b'"').decode("utf-8", "replace")
    return ""
