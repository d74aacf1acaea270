"""Work on the body of a request: read its fields, make the token ids of its prompts. Pure except for the
tokenizer's cache.
"""

import hashlib
import json
from typing import Any, Literal, TypeVar

import msgspec

from fleet.completions import ApiError, context_exceeded
from router.foreign_api import lenient_fields
from router.foreign_api.continuable_fields import obstacle, read_fields
from router.foreign_api.prompt_fields import ChatPrompt, PromptFields, read_prompt
from router.openai_api.request_schema import (
    ChatRequest,
    Request,
    RequestDecoder,
    TextRequest,
    prompts,
    text_messages,
)
from router.tokenization.tokenizer import ModelTokenizer

Kind = Literal["chat", "text", "either"]
"""kind of a body: chat completions, completions, or one of both"""
MAX_PREFIX_BYTES = 256 * 1024
"""bytes of a prompt that are kept to estimate its prefix in a server's cache"""
_MAX_STRING = 2048
_MAX_MEMBERS, _MAX_INNER_MEMBERS = 64, 8
"""Most members kept of a field's list or mapping, and of the collections inside."""
_MAX_DEPTH = 4
_Value = TypeVar("_Value")

_DECODER = RequestDecoder()


class PromptBounds(msgspec.Struct, frozen=True):
    """Limits for the prompts of one request."""

    context: int
    """tokens of the model's largest context, prompt and answer together"""
    prompts: int
    """most prompts"""


def decode(kind: Kind, body: bytes) -> Request:
    """Decode a body. ApiError 400 names the field."""
    if kind == "chat":
        return _DECODER.chat(body)
    return _DECODER.text(body) if kind == "text" else _DECODER.either(body)


def read(kind: Kind, body: bytes) -> Request:
    """Read the fields of a request without its prompts. Values are cut to a small size that still fails the
    same validation. ApiError 400 names the field.
    """
    request = decode(kind, body)
    if (
        isinstance(request, ChatRequest) and len(request.chat_template_kwargs or ()) > _MAX_MEMBERS
    ):  # every name is checked later
        raise ApiError(
            400,
            f"chat_template_kwargs may have at most {_MAX_MEMBERS} names",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    fields = {name: _abridged(getattr(request, name), _MAX_DEPTH) for name in request.__struct_fields__}
    if isinstance(request, ChatRequest):
        fields["messages"] = [{"role": "user", "content": ""}]
    else:
        fields["prompt"] = "-"
    return type(request)(**fields)


def read_passthrough(content_type: str, body: bytes) -> lenient_fields.LenientRequest:
    """Read as `lenient_fields.read`, with the prompt and long strings cut."""
    found = lenient_fields.read(body, content_type)
    cut: dict[str, Any] = {
        name: abridged(value)
        for name, value in msgspec.structs.asdict(found).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(
        found, prompt=found.prompt[:MAX_PREFIX_BYTES], prompt_bytes=len(found.prompt), **cut
    )


def abridged(value: str) -> str:
    """Cut a long string so that different strings (salts, for example) stay different."""
    if len(value) <= _MAX_STRING:
        return value
    return value[:_MAX_STRING] + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _abridged(value: _Value, depth: int) -> _Value | Any:
    """Cut long strings and large collections in a value."""
    if isinstance(value, str):
        return abridged(value)
    if isinstance(value, list | dict) and not depth:
        return type(value)()
    limit = _MAX_MEMBERS if depth == _MAX_DEPTH else _MAX_INNER_MEMBERS
    if isinstance(value, list):
        return [_abridged(one, depth - 1) for one in value[:limit]]
    if isinstance(value, dict):
        return {
            abridged(key): _abridged(one, depth - 1)
            for (key, one), _ in zip(value.items(), range(limit), strict=False)
        }
    return value


def ids_of(request: Request, tokenizer: ModelTokenizer, room: PromptBounds) -> list[list[int]]:
    """Return the token ids of each prompt. ApiError 400 for a prompt without ids, or that does not fit; a
    prompt that cannot fit is refused before tokenisation.
    """
    if isinstance(request, ChatRequest):
        return [chat_ids(rendered(request, tokenizer, room), tokenizer, room)]
    _refuse_many(request, room)
    found = [_prompt_ids(prompt, tokenizer, room) for prompt in prompts(request)]
    for ids in found:
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
        if max(ids) >= tokenizer.vocabulary:
            raise ApiError(
                400,
                f"prompt: token id {max(ids)} is outside the vocabulary of {tokenizer.vocabulary}",
                param="prompt",
                code="invalid_value",
            )
    return found


def rendered(request: ChatRequest, tokenizer: ModelTokenizer, room: PromptBounds) -> str:
    """Return the text to tokenise. ApiError 400 when it cannot fit."""
    text = tokenizer.render(text_messages(request), request.chat_template_kwargs)
    refuse_longer(tokenizer.min_tokens(text), room, "messages", at_least=True)
    return text


def chat_ids(text: str, tokenizer: ModelTokenizer, room: PromptBounds) -> list[int]:
    """Return the ids of a rendered conversation. ApiError 400 when they do not fit."""
    ids = tokenizer.encode_rendered(text)
    refuse_longer(len(ids), room, "messages")
    return ids


def _prompt_ids(prompt: str | list[int], tokenizer: ModelTokenizer, room: PromptBounds) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    refuse_longer(tokenizer.min_tokens(prompt), room, "prompt", at_least=True)
    ids = tokenizer.encode_prompt(prompt)
    refuse_longer(len(ids), room, "prompt")
    return ids


def _refuse_many(request: TextRequest, room: PromptBounds) -> None:
    """Refuse too many prompts, and prompts of too many ids, before examining each of them."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return
    if isinstance(prompt[0], int):
        refuse_longer(len(prompt), room, "prompt")
        return
    if len(prompt) > room.prompts:
        raise ApiError(
            400, f"{len(prompt)} prompts are more than {room.prompts}", param="prompt", code="invalid_value"
        )
    for one in prompt:
        if isinstance(one, list):
            refuse_longer(len(one), room, "prompt")


def refuse_longer(tokens: int, room: PromptBounds, param: str, *, at_least: bool = False) -> None:
    """Raise ApiError 400 for a prompt that leaves no room for an answer."""
    if tokens < room.context:
        return
    error = context_exceeded(room.context, tokens, None, prompt=param, param=param)
    if at_least:
        error = ApiError(
            400, error.message.replace("resulted in", "resulted in at least"), param=param, code=error.code
        )
    raise error


class EncodedPrompt(msgspec.Struct, frozen=True):
    """Prompt of a request to a server that gets text, as that server makes its ids. asks: see
    `PromptFields`. fields: those that a continuation of the answer needs, as JSON, if they were read in
    another process and the answer can be continued; b"": they are yet to be read.
    """

    ids: list[int]
    asks: bool
    fields: bytes = b""


def foreign_prompt(
    body: bytes, tokenizer: ModelTokenizer, context: int, *, chat: bool
) -> EncodedPrompt | None:
    """Make the ids of a body's prompt; None if they cannot be known here, or the prompt does not fit. Never
    raises.
    """
    fields = read_prompt(body, chat=chat)
    text = None if fields is None else foreign_text(fields, tokenizer, context)
    return None if fields is None or text is None else foreign_ids(fields, text, tokenizer)


def foreign_text(fields: PromptFields, tokenizer: ModelTokenizer, context: int) -> str | list[int] | None:
    """Return the text to tokenise, or the client's own ids. None if the template refuses the messages, or the
    prompt does not fit.
    """
    prompt = fields.prompt
    if not isinstance(prompt, ChatPrompt):
        found: str | list[int] | None = prompt.prompt
    else:
        try:
            messages = prompt.messages(in_parts=tokenizer.reads_parts)
            generation = bool(prompt.variables.get("add_generation_prompt", True))
            rendered = tokenizer.render(messages, prompt.variables, add_generation_prompt=generation)
        except ApiError:
            return None
        found = prompt.cut(rendered)
    if found is None or (tokenizer.min_tokens(found) if isinstance(found, str) else len(found)) >= context:
        return None
    return found


def foreign_ids(fields: PromptFields, text: str | list[int], tokenizer: ModelTokenizer) -> EncodedPrompt:
    """Make the ids of the text of `foreign_text`."""
    prompt = fields.prompt
    if isinstance(text, list):
        return EncodedPrompt(text, fields.asks)
    if isinstance(prompt, ChatPrompt):
        return EncodedPrompt(tokenizer.encode_rendered(text), fields.asks)
    ids = tokenizer.encode_prompt(text) if prompt.special else tokenizer.encode_bare(text)
    return EncodedPrompt(ids, fields.asks)


def continuable_fields(body: bytes, *, chat: bool) -> bytes:
    """Return the fields with which the answer to a body can be continued, as JSON; b"" if it cannot be. Never
    raises.
    """
    fields = read_fields(body)
    try:
        return b"" if obstacle(fields, chat=chat) else msgspec.json.encode(fields)
    except (OverflowError, msgspec.MsgspecError):  # an integer beyond 64 bits
        return b""


def as_json(request: Request) -> bytes:
    """Encode a request for another process."""
    return json.dumps(msgspec.to_builtins(request)).encode()  # msgspec encodes no integers beyond 64 bits
