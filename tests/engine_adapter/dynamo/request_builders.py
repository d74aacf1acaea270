"""Requests as a Dynamo frontend sends them, and their context."""

import asyncio
from typing import Any


def request(tokens: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    """A greedy request in the form that a frontend of Dynamo 1.6.1 sends: most values are null. changes: of
    the stop conditions, sampling options, output options or routing hints, or of the request itself."""
    built: dict[str, Any] = {
        "model": "sim",
        "token_ids": list(range(1, 41)) if tokens is None else tokens,
        "stop_conditions": {
            "max_tokens": 5,
            "stop": None,
            "stop_token_ids": None,
            "stop_token_ids_hidden": [],
            "stop_token_ids_visible": None,
            "min_tokens": None,
            "ignore_eos": True,
            "max_thinking_tokens": None,
        },
        "sampling_options": {
            "n": None,
            "best_of": None,
            "presence_penalty": None,
            "frequency_penalty": None,
            "repetition_penalty": None,
            "temperature": 0.0,
            "top_p": None,
            "top_k": None,
            "min_p": None,
            "use_beam_search": None,
            "length_penalty": None,
            "seed": None,
            "include_stop_str_in_output": None,
            "guided_decoding": None,
            "allowed_token_ids": None,
            "bad_words_token_ids": None,
        },
        "output_options": {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None},
        "eos_token_ids": [0],
        "mdc_sum": "0",
        "annotations": [],
        "routing": {"dp_rank": None},
        "extra_args": None,
    }
    for name, value in changes.items():
        places = [part for part in built.values() if isinstance(part, dict) and name in part]
        (places[0] if places else built)[name] = value
    for name in ("lora_name", "cache_salt"):
        if name in changes:
            built["routing"][name] = built.pop(name)
    return built


class FakeContext:
    """Context of one request. `stop` is what a frontend does when its client has gone."""

    def __init__(self, metadata: dict[str, str] | None = None, headers: dict[str, str] | None = None) -> None:
        self.metadata = dict(metadata or {})
        self._headers = headers
        self._stopped = asyncio.Event()

    def id(self) -> str:
        return "request-1"

    def trace_headers(self) -> dict[str, str] | None:
        return self._headers

    async def async_killed_or_stopped(self) -> bool:
        return await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()
