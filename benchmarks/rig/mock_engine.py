"""Trivial engine for measuring routers: answers every completion at once with eight fixed tokens.

Speaks HTTP/1.1 on a bare asyncio protocol (keep-alive, Content-Length bodies), the completions form of a rank
and the chat form of a static backend. Runs as a separate process: `python -m benchmarks.rig.mock_engine
PORT`.
"""

import asyncio
import sys
from typing import cast

import msgspec
import uvloop

TOKENS = 8
WORD = "ok "


def _completion(at: int, *, last: bool) -> bytes:
    choice = {
        "index": 0,
        "text": WORD,
        "token_ids": [65 + at],
        "logprobs": None,
        "finish_reason": "length" if last else None,
    }
    return msgspec.json.encode(
        {
            "id": "cmpl-mock",
            "object": "text_completion",
            "created": 0,
            "model": "mock",
            "choices": [choice],
            "usage": None,
        }
    )


def _chat(at: int, *, last: bool) -> bytes:
    choice = {"index": 0, "delta": {"content": WORD}, "finish_reason": "length" if last else None}
    return msgspec.json.encode(
        {
            "id": "chatcmpl-mock",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "mock",
            "choices": [choice],
        }
    )


def _usage_chunk() -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}
    return msgspec.json.encode(
        {
            "id": "cmpl-mock",
            "object": "text_completion",
            "created": 0,
            "model": "mock",
            "choices": [],
            "usage": usage,
        }
    )


def _whole(*, chat: bool) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS + 1}
    if chat:
        choice: dict[str, object] = {
            "index": 0,
            "message": {"role": "assistant", "content": WORD * TOKENS},
            "finish_reason": "length",
        }
    else:
        choice = {
            "index": 0,
            "text": WORD * TOKENS,
            "token_ids": list(range(65, 65 + TOKENS)),
            "logprobs": None,
            "finish_reason": "length",
        }
    name = "chat.completion" if chat else "text_completion"
    return msgspec.json.encode(
        {"id": "mock", "object": name, "created": 0, "model": "mock", "choices": [choice], "usage": usage}
    )


def _response(body: bytes, kind: bytes = b"application/json") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: "
        + kind
        + b"\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )


def _chunked(events: list[bytes]) -> list[bytes]:
    """Return a streamed answer as one write per event, the head with the first."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    frames = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return [head + frames[0], *frames[1:-1], frames[-1] + b"0\r\n\r\n"]


def _events(bodies: list[bytes]) -> list[bytes]:
    return [b"data: " + body + b"\n\n" for body in bodies] + [b"data: [DONE]\n\n"]


MODELS = _response(
    msgspec.json.encode(
        {"object": "list", "data": [{"id": "mock", "object": "model", "created": 0, "owned_by": "roost"}]}
    )
)
WHOLE = {chat: _response(_whole(chat=chat)) for chat in (False, True)}
STREAM = {
    False: _chunked(
        _events([*(_completion(at, last=at == TOKENS - 1) for at in range(TOKENS)), _usage_chunk()])
    ),
    True: _chunked(_events([_chat(at, last=at == TOKENS - 1) for at in range(TOKENS)])),
}


class MockEngine(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head_end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:head_end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            end = head_end + 4 + length
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[head_end + 4 : end], self._buffer[end:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._transport.write(MODELS)
            return
        chat = b"/chat/" in head.split(b"\r\n", 1)[0]
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(WHOLE[chat])
            return
        for frame in STREAM[chat]:
            self._transport.write(frame)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(MockEngine, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
