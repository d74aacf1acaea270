"""A stream of chat or completions as vLLM 0.32 writes it (see tests/compat): deterministic, with ids, half
characters and held-back text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from router.tokenization.tokenizer import ModelTokenizer
from tests.router.router_fixture import SCRIPT, archive, bpe

TOKENIZER = ModelTokenizer.from_archive(archive(bpe(257), {"eos_token": "<eos>", "chat_template": "x"}))
"""Byte-level without merges: every byte of a character is an id of its own."""
_SCRIPT_IDS = TOKENIZER.encode_rendered(SCRIPT)
PROMPT = TOKENIZER.encode_rendered("prompt: ")


def unbroken(prompt: Sequence[int], count: int) -> list[int]:
    """The ids that greedy decoding emits after a prompt."""
    start = sum(prompt) % len(_SCRIPT_IDS)
    return [_SCRIPT_IDS[(start + at) % len(_SCRIPT_IDS)] for at in range(count)]


def settled(ids: Sequence[int]) -> str:
    """Text of ids without a half character at its end, which vLLM does not send."""
    return TOKENIZER.decode(list(ids)).rstrip("\ufffd")


class Asked:
    """A request as such a server reads it. ValueError when it continues another text, or within a
    character."""

    def __init__(self, path: str, body: bytes, prompt: Sequence[int] = PROMPT) -> None:
        """prompt: ids of the client's prompt, also of a request that continues its answer."""
        fields = json.loads(body)
        self.fields: dict[str, Any] = fields
        self.chat = path == "/v1/chat/completions"
        own = list(prompt)
        given: list[int] = own if self.chat or isinstance(fields["prompt"], str) else fields["prompt"]
        if given[: len(own)] != own:
            raise ValueError("not the prompt")
        self.emitted = given[len(own) :]
        self.given = given
        self.count: int = fields.get("max_completion_tokens") or fields.get("max_tokens") or 16
        self.whole = unbroken(own, len(self.emitted) + self.count)
        if self.whole[: len(self.emitted)] != self.emitted:
            raise ValueError("continues other ids than were emitted")
        if settled(self.emitted) != TOKENIZER.decode(self.emitted):
            raise ValueError("continues within a character")
        stop = fields.get("stop") or []
        self.stops: list[str] = [stop] if isinstance(stop, str) else stop
        self.ids = bool(fields.get("return_token_ids"))

    def pieces(self) -> Iterator[tuple[list[int], str, str | None]]:
        """Ids, text and finish reason of each step."""
        start, held = len(settled(self.emitted)), max((len(stop) for stop in self.stops), default=1) - 1
        sent = start
        for at in range(len(self.emitted), len(self.whole)):
            text = settled(self.whole[: at + 1])
            cut = min((found for stop in self.stops if (found := text.find(stop, start)) >= 0), default=-1)
            last = at == len(self.whole) - 1
            upto = cut if cut >= 0 else len(text) if last else max(sent, len(text) - held)
            yield [self.whole[at]], text[sent:upto], "stop" if cut >= 0 else "length" if last else None
            sent = upto
            if cut >= 0:
                return

    def events(self, sizes: Sequence[int] = (1,)) -> Iterator[bytes]:
        """The stream, event by event; sizes: steps that are sent together, in turn."""
        emitted = 0
        if self.chat:
            role = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield self._event(
                {"choices": [role], "prompt_token_ids": self.given if self.ids else None, "prompt_text": None}
            )
        steps, number, first = list(self.pieces()), 0, True
        while steps:
            together, steps = steps[: sizes[number % len(sizes)]], steps[sizes[number % len(sizes)] :]
            number += 1
            ids = [one for step in together for one in step[0]]
            emitted += len(ids)
            yield self._event(
                {
                    "choices": [
                        self._choice(ids, "".join(step[1] for step in together), together[-1][2], first)
                    ]
                }
            )
            first = False
        if (self.fields.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": len(self.given),
                "total_tokens": len(self.given) + emitted,
                "completion_tokens": emitted,
            }
            yield self._event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _choice(self, ids: list[int], text: str, finish: str | None, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = (
            {"index": 0, "delta": {"content": text}} if self.chat else {"index": 0, "text": text}
        )
        choice |= {"logprobs": None, "finish_reason": finish}
        if finish is not None or not self.chat:
            choice["stop_reason"] = None
        if not self.chat:
            choice["prompt_token_ids"] = self.given if first and self.ids else None
        return choice | {"token_ids": ids if self.ids else None}

    def _event(self, more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": "x-1", "object": kind, "created": 7, "model": self.fields.get("model")}
        return (
            b"data: "
            + json.dumps({**head, **more}, separators=(",", ":"), ensure_ascii=False).encode()
            + b"\n\n"
        )


def summary(stream: bytes) -> dict[str, Any]:
    """What a client makes of a stream: text, ids, finish reason, usage, and an error where there is one."""
    text, ids, finish, usage, error, done = "", [], None, None, None, False
    for event in stream.split(b"\n\n")[:-1]:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
            continue
        assert not done, "something came behind the end"
        chunk = json.loads(data)
        error, usage = chunk.get("error", error), chunk.get("usage", usage)
        for choice in chunk.get("choices", ()):
            assert finish is None, "text came behind the finish reason"
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            ids += choice.get("token_ids") or []
            finish = choice["finish_reason"]
    return {"text": text, "ids": ids, "finish": finish, "usage": usage, "error": error, "done": done}


class VllmLike:
    """Handler of a server that can be told to die, and to send steps together."""

    def __init__(self, sizes: Sequence[int] = (1,), *, detokenizes: bool = True) -> None:
        self.sizes = sizes
        self.detokenizes = detokenizes
        self.die_after: int | None = None
        """events of a stream after which the connection is cut"""
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        if http.path == "/detokenize":
            if not self.detokenizes:
                return web.json_response({"detail": "Not Found"}, status=404)
            return web.json_response({"prompt": TOKENIZER.decode(json.loads(body)["tokens"])})
        asked = Asked(http.path, body)
        self.bodies.append(asked.fields)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        assert http.transport is not None
        for number, event in enumerate(asked.events(self.sizes)):
            if number == self.die_after:
                http.transport.close()
                return response
            await response.write(event)
        return response
