"""Record what a vLLM answers to `requests.ALL`, with and without the ids that Roost asks for beside a
client's own fields.

    python -m tests.compat.record http://127.0.0.1:8000 tests/compat/vllm-0.32.0.json

`make record-vllm` starts the server for it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.compat.exchange import Answer, ask
from tests.compat.requests import ALL, ClientRequest


def with_ids(sent: ClientRequest) -> ClientRequest | None:
    """The same request with `return_token_ids: true`; None where it has no JSON object, or says something of
    them itself."""
    try:
        body = json.loads(sent.body)
    except (ValueError, UnicodeDecodeError):
        return None
    if not isinstance(body, dict) or "return_token_ids" in body or not sent.path.endswith("/completions"):
        return None
    return ClientRequest(
        sent.name,
        sent.path,
        json.dumps({**body, "return_token_ids": True}).encode(),
        sent.method,
        sent.headers,
    )


def as_record(answer: Answer) -> dict[str, Any]:
    """An answer as JSON."""
    headers = [
        [name, value]
        for name, value in answer.headers
        if name not in ("date", "transfer-encoding", "connection")
    ]
    return {
        "status": answer.status,
        "headers": headers,
        "body": answer.body.decode("utf-8"),
        "pieces": list(answer.pieces),
    }


async def main(base: str) -> str:
    """Ask everything once; the recording as JSON."""
    answers: dict[str, dict[str, Any]] = {}
    async with httpx.AsyncClient(timeout=120) as client:
        version = (await client.get(f"{base}/version")).json()["version"]
        models = (await client.get(f"{base}/v1/models")).json()
        for sent in ALL:
            found: dict[str, Any] = {"plain": as_record(await ask(client, base, sent))}
            more = with_ids(sent)
            if more is not None:
                found["with_ids"] = as_record(await ask(client, base, more))
            answers[sent.name] = found
            print(f"{found['plain']['status']} {sent.name}")
    kept = {"server": f"vllm {version}", "models": models, "answers": answers}
    return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(asyncio.run(main(sys.argv[1])), encoding="utf-8")
