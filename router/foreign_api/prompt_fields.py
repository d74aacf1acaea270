"""Prompt of a chat or completions body as vLLM makes it: the fields that shape it, and the variables of the
chat template. Pure.

A body that vLLM might render in another way has no prompt here (None): images, templates of its own,
truncation, several prompts. Such requests are served all the same; their prefix is estimated from their text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fleet.completions import UNREADABLE

_ABSENT = msgspec.Raw(b"")


class ChatPrompt(NamedTuple):
    """Input of a chat template."""

    said: list[tuple[dict[str, Any], list[str]]]
    """messages without their content, each with the texts of its content"""
    variables: dict[str, Any]
    """of the template, beside the messages"""
    final: str | None
    """text of the last message, after which the prompt ends; None: the prompt ends as the template does"""

    def messages(self, *, in_parts: bool) -> list[dict[str, Any]]:
        """Return the messages for a template. in_parts: it reads contents as lists of parts."""
        return [
            {
                **message,
                "content": (
                    [{"type": "text", "text": text} for text in texts]
                    if in_parts and message["role"] != "tool"
                    else "\n".join(texts)
                ),
            }
            for message, texts in self.said
        ]

    def cut(self, rendered: str) -> str | None:
        """Return the part of the rendered text that is the prompt. None if the last message is not in it."""
        if self.final is None:
            return rendered
        bare = self.final.strip()
        start = rendered.rfind(bare)
        if start < 0:
            return None
        # A template may or may not keep the spaces around a message (as in transformers).
        kept = self.final.lstrip()
        whole = rendered[start : start + len(kept)] == self.final
        return rendered[: start + len(kept if whole else bare)]


class PlainPrompt(NamedTuple):
    """Prompt of a completion. special: special tokens are added to a text."""

    prompt: str | list[int]
    special: bool


class PromptFields(NamedTuple):
    """Prompt of a body as far as it states it. asks: token ids may be requested with it: the client says
    nothing of them, and the answer does not repeat the prompt, which would be left out then.
    """

    prompt: ChatPrompt | PlainPrompt
    asks: bool


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    return_token_ids: msgspec.Raw = _ABSENT
    echo: bool | None = None

    @property
    def asks(self) -> bool:
        return self.return_token_ids is _ABSENT and not self.echo


class _Chat(_Shared, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class _Text(_Shared, frozen=True, kw_only=True):
    prompt: str | list[int]
    prompt_embeds: msgspec.Raw = _ABSENT
    add_special_tokens: bool = True


_CHAT: msgspec.json.Decoder[_Chat] = msgspec.json.Decoder(_Chat)
_TEXT: msgspec.json.Decoder[_Text] = msgspec.json.Decoder(_Text)


def read_prompt(body: bytes, *, chat: bool) -> PromptFields | None:
    """Read the prompt of a body. None if it cannot be known here, or the server will refuse it. Never
    raises.
    """
    try:
        if chat:
            fields = _CHAT.decode(body)
            return None if _is_set(fields.truncate_prompt_tokens) else _of_chat(fields)
        text = _TEXT.decode(body)
    except UNREADABLE:
        return None
    if not text.prompt or _is_set(text.prompt_embeds) or _is_set(text.truncate_prompt_tokens):
        return None
    return PromptFields(PlainPrompt(text.prompt, text.add_special_tokens), text.asks)


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _of_chat(fields: _Chat) -> PromptFields | None:
    said = [_message(message) for message in fields.messages]
    continued, generation = fields.continue_final_message, fields.add_generation_prompt
    if (
        not said
        or fields.chat_template is not None
        or fields.add_special_tokens
        or (continued and generation)
        or None in said
    ):
        return None
    known = [one for one in said if one is not None]
    final = "\n".join(known[-1][1]) if continued else None
    return PromptFields(ChatPrompt(known, _variables(fields), final), fields.asks)


def _variables(fields: _Chat) -> dict[str, Any]:
    """Return the template's variables; those of the request itself go before its `chat_template_kwargs`."""
    given = fields.chat_template_kwargs or {}
    own: dict[str, Any] = {
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        "documents": fields.documents,
        "reasoning_effort": fields.reasoning_effort,
    }
    if fields.reasoning_effort is not None and "enable_thinking" not in given:
        own["enable_thinking"] = fields.reasoning_effort != "none"
    tools = None if fields.tools is None else [_tool(tool) for tool in fields.tools]
    return {
        "tools": tools,
        **given,
        **{name: value for name, value in own.items() if value is not None and value != "auto"},
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that vLLM keeps, in its order."""
    function = tool.get("function")
    given = function if isinstance(function, Mapping) else {}
    about = {name: given.get(name) for name in ("name", "description", "parameters")}
    later = tool.get("defer_loading")
    inner = {"strict": given.get("strict"), "defer_loading": given.get("defer_loading", later)}
    about |= {name: value for name, value in inner.items() if value is not None}
    found = {"type": "function", "function": about}
    return found if later is None else {**found, "defer_loading": later}


def _message(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]] | None:
    """Return a message as templates get it, and its texts; None if it has more than text."""
    role, texts = message.get("role"), _texts(message.get("content"))
    if not isinstance(role, str) or texts is None:
        return None
    found: dict[str, Any] = {"role": role}
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            found["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is not None:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        found["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return found, texts


def _texts(content: Any) -> list[str] | None:
    """Return the texts of a content; None if it has other parts."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    if not isinstance(content, Sequence):
        return None
    texts = [text for part in content if (text := _part(part)) is not None]
    return texts if len(texts) == len(content) else None


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates expect them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except UNREADABLE:
            return {}
    return given if isinstance(given, Mapping) else {}
