"""Fields of OpenAI's and vLLM's requests that Roost does not read, as SGLang's sampling parameters. Pure.

A field that would change the answer and that SGLang cannot serve by ids is refused by name. Unknown fields
are ignored, as elsewhere in Roost: gateways and client libraries add their own."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

_SAME = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_new_tokens",
    "stop_token_ids",
    "logit_bias",
    "custom_params",
)
"""Fields that SGLang calls by the same names."""
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "stop_regex": ([], ""),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "lora_path": (),
    "session_params": (),
}
"""By field that is not served, the values that request nothing."""


def sampling_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's sampling parameters for the fields of a request. ValueError names a field that is not
    served, or that contradicts another."""
    for name, neutral in _REFUSED.items():
        if name in fields and fields[name] not in neutral:
            raise ValueError(f"{name} is not served by SGLang's engines here; leave it out")
    found = {name: fields[name] for name in _SAME if name in fields}
    if "min_tokens" in fields:
        found["min_new_tokens"] = fields["min_tokens"]
    grammars = {
        name: shape for name in _READERS if name in fields and (shape := _READERS[name](fields[name]))
    }
    if len(grammars) > 1:
        raise ValueError(f"{', '.join(grammars)}: only one of them can shape an answer")
    for shape in grammars.values():
        found |= shape
    return found


def stop_ids(parameters: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end an answer beside those of the model. ValueError for other values."""
    ids = parameters.get("stop_token_ids") or ()
    if not isinstance(ids, list | tuple) or any(type(one) is not int for one in ids):
        raise ValueError("stop_token_ids: must be a list of ids")
    return frozenset(ids)


def _schema(value: Any) -> dict[str, str]:
    return {"json_schema": _text(value)}


def _text(value: Any) -> str:
    """Return a schema as the JSON text that SGLang takes."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _choice(value: Any) -> dict[str, str]:
    if not isinstance(value, list) or not value or any(not isinstance(one, str) for one in value):
        raise ValueError("guided_choice: must be a list of texts")
    return {"regex": f"({'|'.join(re.escape(one) for one in value)})"}


def _response_format(value: Any) -> dict[str, str]:
    kind = value.get("type", "text") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            about = value.get("json_schema")
            if isinstance(about, Mapping) and isinstance(about.get("schema"), Mapping):
                return _schema(about["schema"])
            raise ValueError("response_format: json_schema needs a schema")
        case "structural_tag":
            return {"structural_tag": _text(value)}
    raise ValueError(f"response_format: the type {kind!r} is not known; use json_schema, json_object or text")


def _structured(value: Any) -> dict[str, str]:
    """Read vLLM's `structured_outputs`: one of several grammars."""
    readers: dict[str, Callable[[Any], dict[str, str]]] = {
        "json": _schema,
        "regex": lambda one: {"regex": one},
        "grammar": lambda one: {"ebnf": one},
        "choice": _choice,
        "structural_tag": lambda one: {"structural_tag": _text(one)},
        "json_object": lambda one: {"json_schema": '{"type": "object"}'} if one else {},
    }
    stated = value if isinstance(value, Mapping) else {}
    given = {name: one for name, one in stated.items() if one is not None and one is not False}
    unknown = set(given) - set(readers)
    if unknown or len(given) != 1:
        raise ValueError(f"structured_outputs: needs one of {', '.join(readers)}, not {', '.join(given)}")
    ((name, one),) = given.items()
    return readers[name](one)


_READERS: Mapping[str, Callable[[Any], dict[str, str]]] = {
    "json_schema": _schema,
    "regex": lambda one: {"regex": one},
    "ebnf": lambda one: {"ebnf": one},
    "structural_tag": lambda one: {"structural_tag": _text(one)},
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": lambda one: {"regex": one},
    "guided_grammar": lambda one: {"ebnf": one},
    "guided_choice": _choice,
}
"""By field that states a grammar, its reader."""
