"""A server that answers as a recorded vLLM did, in the same pieces, and refuses what was never recorded."""

import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.compat.record import with_ids
from tests.compat.requests import ALL, ClientRequest

RECORDED = Path(__file__).parent / "vllm-0.32.0.json"
_NEVER_RECORDED = 599


class Replay:
    """`unknown` lists requests that differ from every recorded one: Roost changed them on the way."""

    def __init__(self, recorded: Path = RECORDED) -> None:
        kept: dict[str, Any] = json.loads(recorded.read_text(encoding="utf-8"))
        self.models: dict[str, Any] = kept["models"]
        self.unknown: list[str] = []
        self._answers: dict[tuple[str, str, bytes, str | None], dict[str, Any]] = {}
        for sent in ALL:
            answers = kept["answers"][sent.name]
            self._answers.setdefault(_key(sent), answers["plain"])
            more = with_ids(sent)
            if more is not None:
                self._answers[_key(more)] = answers["with_ids"]
                if _is_stream(answers["plain"]):
                    self._answers[_key(sent)] = _without_ids(answers["with_ids"])

    def app(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._list)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        sent = ClientRequest(
            "", http.path, body, http.method, {name.lower(): value for name, value in http.headers.items()}
        )
        found = self._answers.get(_key(sent))
        if found is None:
            self.unknown.append(f"{http.method} {http.path} {body[:200]!r}")
            return web.Response(status=_NEVER_RECORDED, text="never recorded")
        return await _sent(http, found)


def _is_stream(answer: dict[str, Any]) -> bool:
    return any(
        name == "content-type" and value.startswith("text/event-stream") for name, value in answer["headers"]
    )


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """The stream that was recorded with ids as vLLM writes it without. The plain recording has the same text,
    but which steps go out together is chance, and differs between two runs."""
    events = re.sub(r'"((?:prompt_)?token_ids)":\[[0-9,]*\]', r'"\1":null', answer["body"]).split("\n\n")[:-1]
    whole = [f"{event}\n\n" for event in events]
    return answer | {"body": "".join(whole), "pieces": [len(event.encode()) for event in whole]}


def _key(sent: ClientRequest) -> tuple[str, str, bytes, str | None]:
    """Bodies are equal as JSON, wherever they are JSON; a chosen rank and a kind of body that is not JSON
    count, too."""
    try:
        body = json.dumps(json.loads(sent.body), sort_keys=True).encode()
    except ValueError:
        body = sent.body
    kind = sent.headers.get("content-type", "").partition(";")[0]
    rank = sent.headers.get("x-data-parallel-rank")
    return sent.method, sent.path, body, rank or (kind if kind == "text/plain" else None)


async def _sent(http: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    headers = [(name, value) for name, value in answer["headers"] if name != "server"]
    body = answer["body"].encode()
    response = web.StreamResponse(status=answer["status"], headers=headers)
    await response.prepare(http)
    at = 0
    for length in answer["pieces"]:
        await response.write(body[at : at + length])
        at += length
    await response.write_eof()
    return response
