"""Clients that other people wrote, asking one base URL; prints what each call returned or raised as JSON
lines.

    python -m tests.compat.clients openai http://127.0.0.1:8000
    python -m tests.compat.clients litellm http://127.0.0.1:8000

Runs as a process of its own: these libraries warn, patch and start threads as they please.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tests.compat.requests import ACCEPTED, CHAT, REFUSED, TEXT

_NEEDED = {CHAT: ("model", "messages"), TEXT: ("model", "prompt")}
"""Arguments that the clients' own signatures insist on; requests without them never leave the client."""


def _bodies() -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Name, path and fields of each request that a client can express."""
    for sent in (*ACCEPTED, *REFUSED):
        try:
            body = json.loads(sent.body)
        except (ValueError, UnicodeDecodeError):
            continue
        if not isinstance(body, dict) or sent.headers != {"content-type": "application/json"}:
            continue
        if all(body.get(name) is not None for name in _NEEDED[sent.path]):
            yield sent.name, sent.path, body


def _openai(base: str) -> Callable[[str, dict[str, Any]], Any]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)

    def call(path: str, body: dict[str, Any]) -> Any:
        create = client.chat.completions.create if path == CHAT else client.completions.create
        needed = {name: body[name] for name in (*_NEEDED[path], "stream") if name in body}
        answer = create(
            **needed, extra_body={name: value for name, value in body.items() if name not in needed}
        )
        return _in_order(answer, body) if body.get("stream") else answer.model_dump(mode="json")

    return call


def _in_order(chunks: Iterable[Any], body: dict[str, Any]) -> list[Any]:
    """Chunks of a stream. In which order several choices take turns is chance, and LiteLLM does not say whose
    a chunk is: those are sorted."""
    came = [chunk.model_dump(mode="json") for chunk in chunks]
    several = body.get("n", 1) > 1 or isinstance(body.get("prompt"), list)
    return sorted(came, key=lambda chunk: json.dumps(chunk["choices"], sort_keys=True)) if several else came


def _litellm(base: str) -> Callable[[str, dict[str, Any]], Any]:
    import litellm

    litellm.suppress_debug_info = True

    def call(path: str, body: dict[str, Any]) -> Any:
        complete = litellm.completion if path == CHAT else litellm.text_completion
        needed = {
            name: body[name]
            for name in ("messages", "prompt", "stream", "max_tokens", "temperature", "n")
            if name in body
        }
        rest = {name: value for name, value in body.items() if name not in needed and name != "model"}
        provider = "openai" if path == CHAT else "text-completion-openai"
        answer = complete(
            model=f"{provider}/{body['model']}",
            api_base=f"{base}/v1",
            api_key="none",
            num_retries=0,
            max_retries=0,
            extra_body=rest,
            **needed,
        )
        return _in_order(answer, body) if body.get("stream") else answer.model_dump(mode="json")

    return call


def main(client: str, base: str) -> None:
    """Print one line per request: its name and what came back."""
    call = {"openai": _openai, "litellm": _litellm}[client](base)
    for name, path, body in _bodies():
        try:
            came: Any = call(path, body)
        except Exception as error:  # noqa: BLE001 whatever a client raises is what is compared
            came = {
                "raised": type(error).__name__,
                "status": getattr(error, "status_code", None),
                "said": str(error),
            }
        print(json.dumps({"name": name, "came": came}, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
