"""Requests as clients of vLLM send them: accepted ones, refused ones, and routes beside chat and
completions."""

import json
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class ClientRequest:
    """One request. `body` is sent as it stands."""

    name: str
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def _json(name: str, path: str, body: object, **headers: str) -> ClientRequest:
    given = {
        "content-type": "application/json",
        **{key.replace("_", "-"): value for key, value in headers.items()},
    }
    return ClientRequest(name, path, json.dumps(body).encode(), headers=given)


def chat(name: str, **fields: Any) -> ClientRequest:
    """A short greedy chat; None leaves a default out."""
    base = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about Debian."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return _json(f"chat {name}", CHAT, _merged(base, fields))


def text(name: str, **fields: Any) -> ClientRequest:
    """A short greedy completion; None leaves a default out."""
    return _json(
        f"text {name}",
        TEXT,
        _merged({"model": MODEL, "prompt": "import os\n", "max_tokens": 12, "temperature": 0}, fields),
    )


def _merged(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    absent = {key for key, value in fields.items() if value is ...}
    return {key: value for key, value in {**base, **fields}.items() if key not in absent}


_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}

ACCEPTED = (
    chat("plain"),
    chat("stream", stream=True),
    chat("stream with usage", stream=True, stream_options={"include_usage": True}),
    chat("stream with usage in every chunk", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    chat("stream with ids", stream=True, return_token_ids=True),
    chat("with ids", return_token_ids=True),
    chat("two choices", n=2, temperature=0.7, seed=3),
    chat("two choices streamed", n=2, temperature=0.7, seed=3, stream=True),
    chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=4),
    chat("logprobs streamed", logprobs=True, top_logprobs=2, max_tokens=4, stream=True),
    chat("stop", stop=["e", "\n\n"]),
    chat("stop streamed", stop=["e i"], stream=True, max_tokens=40),
    chat("stop kept", stop=["e"], include_stop_str_in_output=True),
    chat("max_tokens as a float", max_tokens=8.0),
    chat("max_tokens as a string", max_tokens="8"),
    chat("temperature as a string", temperature="0.0"),
    chat("stream as a number", stream=0),
    chat("null usage option", stream=True, stream_options={"include_usage": None}),
    chat("null stream options", stream_options=None),
    chat("no model", model=...),
    chat("null model", model=None),
    chat("one of two words", structured_outputs={"choice": ["red", "green"]}),
    chat("one of two words streamed", structured_outputs={"choice": ["red", "green"]}, stream=True),
    chat("a JSON schema", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}, max_tokens=30),
    chat("a regular expression", structured_outputs={"regex": "[0-9]{3}"}),
    chat("penalties", repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    chat("min_p and top_k", min_p=0.1, top_k=5, top_p=0.9, temperature=0.5, seed=7),
    chat("min_tokens", min_tokens=5),
    chat("stop_token_ids", stop_token_ids=[101]),
    chat("bad_words", bad_words=["the"]),
    chat("ignore_eos", ignore_eos=True, max_tokens=20),
    chat("prompt_logprobs", prompt_logprobs=1, max_tokens=2),
    chat("priority zero", priority=0),
    chat("unknown field", wibble={"a": [1, 2]}),
    chat("cache_salt", cache_salt="tenant-a"),
    chat("a template without an answer's head", add_generation_prompt=False),
    chat("a continued message", messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Deb"}],
         add_generation_prompt=False, continue_final_message=True),
    chat("parts of text", messages=[{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]}]),
    chat("tools that are not to be used", tools=[_TOOL], tool_choice="none"),
    chat("max_completion_tokens", max_tokens=..., max_completion_tokens=7),
    chat("more than ASCII", messages=[{"role": "user", "content": "Größe 日本語 🙂 \u0000"}]),
    text("plain"),
    text("stream", stream=True),
    text("stream with usage", stream=True, stream_options={"include_usage": True}),
    text("stream with ids", stream=True, return_token_ids=True),
    text("several prompts", prompt=["import os\n", "def f("]),
    text("several prompts streamed", prompt=["import os\n", "def f("], stream=True),
    text("ids", prompt=[105, 109, 112]),
    text("lists of ids", prompt=[[105, 109, 112], [100, 101]]),
    text("echo", echo=True),
    text("echo without an answer", echo=True, max_tokens=0, logprobs=1),
    text("logprobs", logprobs=3, max_tokens=3),
    text("no max_tokens", max_tokens=...),
    text("seeded", seed=11, temperature=0.9),
    text("three choices", n=3, temperature=0.9, seed=1),
    text("truncated prompt", prompt="a b c d e f g h", truncate_prompt_tokens=4),
    text("no model", model=...),
)  # fmt: skip

REFUSED = (
    chat("an unknown model", model="other"),
    chat("no messages", messages=...),
    chat("empty messages", messages=[]),
    chat("messages of the wrong type", messages="Hi"),
    chat("too hot", temperature=-1),
    chat("too many tokens", max_tokens=5000),
    chat("a prompt beyond the context", messages=[{"role": "user", "content": "a " * 2000}]),
    chat("no tokens", max_tokens=0),
    chat("top_p of zero", top_p=0),
    chat("too many logprobs", logprobs=True, top_logprobs=500),
    chat("top_logprobs alone", top_logprobs=2),
    chat("a tool by force", tools=[_TOOL], tool_choice="required"),
    chat("an unknown tool", tool_choice={"type": "function", "function": {"name": "g"}}),
    chat("two kinds of structure", structured_outputs={"choice": ["a"], "regex": "b"}),
    chat("a schema that is none", response_format={"type": "json_schema"}),
    chat("stream options without a stream", stream_options={"include_usage": True}),
    chat("no choices", n=0),
    chat("an image", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]),
    chat("a wrong type of content", messages=[{"role": "user", "content": 5}]),
    chat("an empty salt", cache_salt=""),
    ClientRequest("chat bad JSON", CHAT, b'{"model": "tiny", ', headers={"content-type": "application/json"}),
    ClientRequest("chat not an object", CHAT, b"[1, 2]", headers={"content-type": "application/json"}),
    ClientRequest("chat not UTF-8", CHAT, b'{"model": "\xff"}', headers={"content-type": "application/json"}),
    ClientRequest("chat empty body", CHAT, b"", headers={"content-type": "application/json"}),
    ClientRequest("chat as plain text", CHAT, chat("").body, headers={"content-type": "text/plain"}),
    text("an unknown model", model="other"),
    text("no prompt", prompt=...),
    text("an empty prompt", prompt=""),
    text("an id outside the vocabulary", prompt=[5000]),
    text("a suffix", suffix="end"),
    text("best_of", best_of=3),
    text("embeddings without a prompt", prompt=..., prompt_embeds="AAAA"),
    text("more tokens than the context", max_tokens=5000),
    text("too many logprobs", logprobs=500),
    ClientRequest("a rank that is not there", TEXT, text("").body, headers={"content-type": "application/json", "x-data-parallel-rank": "5"}),
)  # fmt: skip

OTHER_ROUTES = (
    _json("responses", "/v1/responses", {"model": MODEL, "input": "abc", "max_output_tokens": 8, "temperature": 0}),
    _json("responses streamed", "/v1/responses", {"model": MODEL, "input": "abc", "max_output_tokens": 6, "temperature": 0, "stream": True}),
    _json("messages", "/v1/messages", {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}),
    _json("messages streamed", "/v1/messages",
          {"model": MODEL, "max_tokens": 6, "temperature": 0, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}),
    _json("counted tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}),
    _json("embeddings", "/v1/embeddings", {"model": MODEL, "input": "abc"}),
    _json("rerank", "/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b", "c"]}),
    _json("score", "/v1/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    _json("tokenize", "/tokenize", {"model": MODEL, "prompt": "abc"}),
    _json("tokenize a chat", "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}),
    _json("detokenize", "/detokenize", {"model": MODEL, "tokens": [105, 109]}),
    ClientRequest("an answer that is not there", "/v1/responses/resp_none", method="GET"),
)  # fmt: skip

ALL = ACCEPTED + REFUSED + OTHER_ROUTES
