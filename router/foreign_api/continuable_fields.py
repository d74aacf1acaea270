"""Request fields and continuation: fields that prevent an exact continuation of the answer at another server,
and fields that are copied into the continuation request. Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from fleet.completions import UNREADABLE

CONTINUED_FIELDS = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "priority",
        "cache_salt",
        "logit_bias",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream",
        "stream_options",
    }
)
"""Fields copied unchanged into the continuation request."""
_PROMPT_ONLY = frozenset(
    {
        "messages",
        "prompt",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "add_special_tokens",
        "documents",
    }
)
"""Fields that only shape the prompt, whose ids are known."""
_HARMLESS = frozenset(
    {"metadata", "store", "request_id", "max_tokens", "max_completion_tokens", "return_token_ids"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True, False),
}
"""Neutral values by field. With other values a continuation would not be exact."""


class _Part(msgspec.Struct):
    type: str


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_LONG: dict[str, Any] = {"messages": list[_Message], "prompt": str | list[int]}
"""Forms that consist of one choice of plain text."""


def read_fields(body: bytes) -> dict[str, Any]:
    """Decode the fields of a body. Messages and prompts may be long: they become True if they are plain text
    (or ids), else False.
    """
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields = {name: msgspec.json.decode(value) for name, value in raw.items() if name not in _LONG}
    except UNREADABLE:
        return {}
    return fields | {name: _is_plain(raw[name], kind) for name, kind in _LONG.items() if name in raw}


def _is_plain(raw: msgspec.Raw, kind: Any) -> bool:
    try:
        found = msgspec.json.decode(raw, type=kind)
    except UNREADABLE:
        return False
    if not isinstance(found, list):
        return True
    parts = (one.content for one in found if isinstance(one, _Message) and isinstance(one.content, list))
    return all(part.type == "text" for content in parts for part in content)


def obstacle(fields: Mapping[str, Any], *, chat: bool) -> str | None:
    """Return the first reason why the rest of the answer would not be exact at another server, or None."""
    for name, value in fields.items():
        known = name in CONTINUED_FIELDS or name in _PROMPT_ONLY or name in _HARMLESS
        if (
            not known
            and value is not None
            and not any(type(value) is type(one) and value == one for one in _NEUTRAL.get(name, ()))
        ):
            return f"{name} cannot be continued exactly"
    if not fields:
        return "its body cannot be read"
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        return "the random numbers of its seed would start over"
    if any(value for name, value in (fields.get("stream_options") or {}).items() if name != "include_usage"):
        return "stream_options has more than include_usage"
    limits = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if type(fields.get("return_token_ids", True)) is not bool or any(
        limit is not None and type(limit) is not int for limit in limits
    ):
        return "a field has an unusual type"
    if not fields.get("messages" if chat else "prompt"):
        return "its messages contain more than text" if chat else "it has several prompts"
    return None
