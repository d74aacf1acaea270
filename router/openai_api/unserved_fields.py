"""Fields of OpenAI's, vLLM's and SGLang's requests that change an answer and that Roost's engines do not
serve. Pure.

Such fields are refused by name, since ignoring them silently would produce another answer than requested. An
engine that declares `Capabilities.passes_fields` gets the fields that its own sampling serves. A field in
none of these lists is passed to such engines and otherwise ignored, as vLLM does: gateways and client
libraries add fields of their own, and an unknown field cannot be said to change the answer. Known and
harmless are, among others, metadata, store, service_tier, user, parallel_tool_calls, prediction (it makes
answers faster, not different) and data_parallel_rank.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

Neutral = tuple[Any, ...]


class FieldGroup:
    """Some fields of a request: by name, the values besides null that request nothing."""

    def __init__(self, neutral: Mapping[str, Neutral]) -> None:
        self.neutral = neutral
        self._values = attrgetter(*neutral)

    def effective_in(self, request: msgspec.Struct) -> Sequence[str]:
        """Return the names of the fields that have an effective value in a request (of a form that has all of
        them).
        """
        values = self._values(request)
        if values.count(None) == len(values):
            return ()  # the usual case
        return [
            name
            for value, (name, neutral) in zip(values, self.neutral.items(), strict=True)
            if value is not None and not any(value == one for one in neutral)
        ]


_NONE: Neutral = ()
_Request = TypeVar("_Request", bound=msgspec.Struct)

SAMPLING = FieldGroup(
    {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_p": (0,),
        "min_tokens": (0,),
        "min_new_tokens": (0,),
        "stop_token_ids": ([],),
        "stop_regex": ([], ""),
        "bad_words": ([],),
        "allowed_token_ids": _NONE,
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "truncate_prompt_tokens": (-1,),
        "prompt_logprobs": _NONE,
        "logprob_token_ids": ([],),
        "return_tokens_as_token_ids": (False,),
        "return_hidden_states": (False,),
        "response_format": ({"type": "text"}, {}),
        "structured_outputs": _NONE,
        "guided_json": _NONE,
        "guided_regex": _NONE,
        "guided_choice": _NONE,
        "guided_grammar": _NONE,
        "guided_decoding_backend": _NONE,
        "guided_whitespace_pattern": _NONE,
        "structural_tag": _NONE,
        "json_schema": _NONE,
        "regex": _NONE,
        "ebnf": _NONE,
        "logits_processors": ([],),
        "custom_logit_processor": _NONE,
        "custom_params": _NONE,
        "thinking_token_budget": _NONE,
        "vllm_xargs": ({},),
        "kv_transfer_params": _NONE,
        "lora_path": _NONE,
        "session_params": _NONE,
    }
)
"""Served by an engine's sampling, if at all."""
CHAT = FieldGroup(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "reasoning_effort": _NONE,
        "reasoning": _NONE,
        "thinking": _NONE,
        "include_reasoning": (True,),
        "separate_reasoning": (True,),
        "verbosity": ("medium",),
        "modalities": (["text"],),
        "audio": _NONE,
        "web_search_options": _NONE,
        "documents": ([],),
        "chat_template": _NONE,
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "echo": (False,),
        "return_token_ids": (False,),
    }
)
"""Fields of chats. They belong to the chat template or to the format of the answer, which are Roost's, and
reach no engine.
"""
TEXT = FieldGroup({"echo": (False,), "suffix": ("",), "prompt_embeds": _NONE, "add_special_tokens": (True,)})
"""Fields of completions, likewise."""
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        "additional_special_tokens",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Names that `chat_template_kwargs` may not set: the special tokens of a prompt belong to the model, and the
other fields are refused in the request itself.
"""


class PassedFields(NamedTuple):
    """Fields of a request that Roost does not read.

    values: their JSON, unchanged. binding: the fields that change the answer. A request with a binding field
    goes to no other engine, and no other rank continues its answer: a grammar or a penalty would start anew
    in mid-sentence.
    """

    values: Mapping[str, msgspec.Raw]
    binding: tuple[str, ...]


NO_FIELDS = PassedFields(MappingProxyType({}), ())


def with_fields(kind: type[_Request], fields: Iterable[str]) -> type[_Request]:
    """Return a request class that has these fields, too, of any type."""
    more = [(name, Any, None) for name in fields if name not in kind.__struct_fields__]
    found = msgspec.defstruct(f"{kind.__name__}Body", more, bases=(kind,), frozen=True, kw_only=True)
    return cast("type[_Request]", found)


def passed(body: bytes, read: Collection[str]) -> dict[str, msgspec.Raw]:
    """Return a body's fields for an engine that accepts fields unknown to Roost: all but `read`, with
    unchanged JSON. null requests nothing and is left out. The body was decoded before, so it is an object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: value for name, value in fields.items() if name not in read and bytes(value) != b"null"}
