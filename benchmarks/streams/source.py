"""Engine that streams one token to every open request at each step, for measuring routers.

Speaks a rank's completions API, its token frames included, and the chat API of another server, on a bare
asyncio protocol. Runs as a separate process: `python -m benchmarks.streams.source PORT STEP_MS`.
"""

import asyncio
import re
import sys
import time
from collections import defaultdict
from typing import cast

import uvloop

from fleet.completions.token_frames import HEADER, PATH, PieceEnd, TokenPiece, encode

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_HEAD_IN_FRAMES = _HEAD[:-2] + HEADER.encode() + b": 1\r\n\r\n"
_FRAMES_HEAD = _HEAD[:-2] + HEADER.encode() + b": %b\r\n\r\n"
_FRAMES = re.compile(HEADER.encode() + rb": ?(\w+)/(\d+)")
_LENGTH = PieceEnd(finish_reason="length")
_MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","created":0,"owned_by":"roost"}]}'
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_FIRST_SECONDS = 0.1
"""Least time between a request and its first token, so that streams that begin together run in step."""
_RANK_EVENT = (
    b'data: {"id":"cmpl-mock","model":"mock","choices":[{"index":0,"text":" word","token_ids":[65],'
    b'"logprobs":null,"finish_reason":null}],"created":0,"object":"text_completion","usage":null}\n\n'
)
_CHAT_EVENT = (
    b'data: {"id":"chatcmpl-mock","object":"chat.completion.chunk","created":0,"model":"mock","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
_ROLE = _CHAT_EVENT.replace(b'"content":" word"', b'"role":"assistant","content":""')


def _last(event: bytes) -> bytes:
    return event.replace(b'"finish_reason":null', b'"finish_reason":"length"') + b"data: [DONE]\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_NEXT = tuple(map(_chunk, (_RANK_EVENT, _CHAT_EVENT)))
_END = tuple(_chunk(_last(event)) + b"0\r\n\r\n" for event in (_RANK_EVENT, _CHAT_EVENT))


class _Stream:
    """One answer in progress. carrier: connection of its token frames, if it has one; number: its number
    there."""

    __slots__ = ("begins", "carrier", "chat", "left", "number", "transport")

    def __init__(self, transport: asyncio.Transport, tokens: int, *, chat: bool) -> None:
        self.transport = transport
        self.left = tokens
        self.begins = time.monotonic() + _FIRST_SECONDS
        self.chat = chat
        self.carrier: asyncio.Transport | None = None
        self.number = 0


class Source:
    """All answers in progress, and their steps."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self.streams: dict[asyncio.Transport, _Stream] = {}
        self._carriers: dict[str, asyncio.Transport] = {}

    def carry(self, transport: asyncio.Transport) -> None:
        """Begin to send token frames on a connection."""
        name = f"frames{id(transport)}"
        self._carriers[name] = transport
        transport.write(_FRAMES_HEAD % name.encode())

    def begin(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        """Begin an answer with the number of tokens that the request's body states."""
        found = _MAX_TOKENS.search(body)
        stream = _Stream(transport, 16 if found is None else int(found[1]), chat=b"/chat/" in head[:64])
        self.streams[transport] = stream
        wanted = _FRAMES.search(head)
        if wanted is not None:
            stream.carrier, stream.number = self._carriers[wanted[1].decode()], int(wanted[2])
            transport.write(_HEAD_IN_FRAMES)
        else:
            transport.write(_HEAD + (_chunk(_ROLE) if stream.chat else b""))

    async def run(self) -> None:
        """Step for ever, at fixed times."""
        due = time.monotonic()
        while True:
            due = max(due + self._step_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._step()

    def _step(self) -> None:
        now, frames = time.monotonic(), defaultdict[asyncio.Transport, list[TokenPiece]](list)
        ended: list[_Stream] = []
        for stream in list(self.streams.values()):
            if now < stream.begins:
                continue
            stream.left -= 1
            if stream.carrier is not None:
                frames[stream.carrier].append(
                    TokenPiece(stream.number, [65], " word", None if stream.left else _LENGTH)
                )
            else:
                stream.transport.write((_NEXT if stream.left else _END)[stream.chat])
            if not stream.left:
                del self.streams[stream.transport]
                ended += [stream] if stream.carrier is not None else []
        for carrier, pieces in frames.items():
            carrier.write(_chunk(encode(pieces)))
        for stream in ended:
            stream.transport.write(b"0\r\n\r\n")


class _Door(asyncio.Protocol):
    def __init__(self, source: Source) -> None:
        self._source = source
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
        if head.startswith(b"get " + PATH.encode()):
            self._source.carry(self._transport)
        elif head.startswith(b"get"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(_MODELS), _MODELS)
            )
        else:
            self._source.begin(self._transport, head, body)

    def connection_lost(self, error: Exception | None) -> None:
        self._source.streams.pop(self._transport, None)


async def _serve(port: int, step_seconds: float) -> None:
    source = Source(step_seconds)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Door(source), "127.0.0.1", port, backlog=4096)
    async with server:
        await source.run()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))
