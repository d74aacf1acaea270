"""Fields of OpenAI's, vLLM's and SGLang's requests that change an answer and that Roost's engines do not serve. Pure.

They are refused by name: ignored in silence they would give another answer than was asked for. An engine that declares
`Capabilities.passes_fields` is given those that its own sampling serves. A field that no list here knows is passed to such engines and
otherwise ignored, as vLLM does: gateways and client libraries add fields of their own, and one that nobody knows cannot be said to change the
answer. Known and harmless are, among others, metadata, store, service_tier, user, parallel_tool_calls, prediction (it makes answers
faster, not others) and data_parallel_rank.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

Neutral = tuple[Any, ...]


class FieldGroup:
    """Some fields of a request: by name, the values beside null that ask for nothing."""

    def __init__(self, neutral: Mapping[str, Neutral]) -> None:
        self.neutral = neutral
        self._values = attrgetter(*neutral)

    def asked_by(self, request: msgspec.Struct) -> Sequence[str]:
        """Names of the fields that a request (of a form that has all of them) has with a value that asks for something."""
        values = self._values(request)
        if values.count(None) == len(values):
            return ()  # the usual case
        return [
            name for value, (name, neutral) in zip(values, self.neutral.items(), strict=True) if value is not None and not any(value == one for one in neutral)
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
"""Of chats: they belong to the chat template or to the form of the answer, which are Roost's, and reach no engine."""
TEXT = FieldGroup({"echo": (False,), "suffix": ("",), "prompt_embeds": _NONE, "add_special_tokens": (True,)})
"""Of completions, likewise."""
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens"),
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    }
)
"""What `chat_template_kwargs` may not set: a prompt's special tokens are the model's, and these fields are refused beside it."""


class PassedFields(NamedTuple):
    """Fields of a request that Roost does not read.

    values: their JSON as it came. binding: those that change the answer. A request that has one goes to no other engine, and its answer is not
    continued by another rank: a grammar or a penalty would start anew in mid-sentence.
    """

    values: Mapping[str, msgspec.Raw]
    binding: tuple[str, ...]


NO_FIELDS = PassedFields(MappingProxyType({}), ())


def with_fields(kind: type[_Request], fields: Iterable[str]) -> type[_Request]:
    """The form of a request that has these fields, too, whatever they hold."""
    more = [(name, Any, None) for name in fields if name not in kind.__struct_fields__]
    found = msgspec.defstruct(f"{kind.__name__}Body", more, bases=(kind,), frozen=True, kw_only=True)
    return cast("type[_Request]", found)


def passed(body: bytes, read: Collection[str]) -> dict[str, msgspec.Raw]:
    """A body's fields for an engine that takes what Roost does not read: all but `read`, with their JSON as it came; null asks for nothing
    and is left out. The body was decoded before, so that it is an object."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: value for name, value in fields.items() if name not in read and bytes(value) != b"null"}
