"""A vLLM made of a recording (`record.py`): its HTTP answers from a real server, its KV events from real sockets
with the numbers and the replay of vLLM's publisher."""

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from tests.web_server import served_web

RECORDING: dict[str, Any] = json.loads(Path(__file__).with_name("vllm-0.32.0.json").read_text())
FRAMES = {int(rank): [base64.b64decode(one) for one in found] for rank, found in RECORDING["frames"].items()}
"""Payloads of the KV events of each rank, in order."""
END = (-1).to_bytes(8, "big", signed=True)


def frames_after(step: int) -> dict[int, int]:
    """Number of events that each rank has published once this step of the recording is over; -1: before the
    first."""
    if step < 0:
        return dict.fromkeys(FRAMES, 0)
    return {int(rank): count for rank, count in RECORDING["steps"][step]["frames"].items()}


class Publisher:
    """Events of one rank: numbered, buffered and replayed as by vLLM's ZmqEventPublisher."""

    def __init__(
        self,
        context: "zmq.asyncio.Context",
        *,
        replay: bool,
        buffer_steps: int,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """ports: of events and replays. None: any free ones."""
        self._context = context
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.number = 0
        self.replays = 0
        self._events: Any = context.socket(zmq.PUB)
        self.port = _bound(self._events, None if ports is None else ports[0])
        self._replay: Any = context.socket(zmq.ROUTER) if replay else None
        self.replay_port = (
            None if self._replay is None else _bound(self._replay, None if ports is None else ports[1])
        )

    async def publish(self, payload: bytes, *, lost: bool = False) -> None:
        """Publish a batch. lost: no subscriber gets it, but the buffer has it."""
        number, self.number = self.number, self.number + 1
        self._buffer.append((number, payload))
        if not lost:
            await self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def serve(self) -> None:
        """Answer replays until cancelled."""
        while self._replay is not None:
            client, empty, begin = await self._replay.recv_multipart()
            self.replays += 1
            for number, payload in list(self._buffer):
                if number >= int.from_bytes(begin, "big"):
                    await self._replay.send_multipart(
                        [client, empty, b"", number.to_bytes(8, "big"), payload]
                    )
            await self._replay.send_multipart([client, empty, b"", END, b""])

    def start_anew(self) -> None:
        """Number from 0 again, as after a restart on the same ports."""
        self.number = 0
        self._buffer.clear()

    async def lose_connections(self) -> None:
        """Break all connections of subscribers, and accept new ones at once."""
        endpoint = f"tcp://127.0.0.1:{self.port}"
        self._events.close(linger=0)
        self._events = self._context.socket(zmq.PUB)
        while True:
            try:
                return self._events.bind(endpoint)
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


def _bound(socket: Any, port: int | None) -> int:
    """Bind a socket, and return its port."""
    if port is None:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


class RecordedVllm:
    """The server. Its answers may be changed at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.up = True
        self.metrics: str = RECORDING["metrics"]
        self.models: dict[str, Any] = json.loads(json.dumps(RECORDING["models"]))
        self.publishers: dict[int, Publisher] = {}
        self.sources: dict[str, Any] | None = {}
        self.readings = 0
        """Answers of /metrics."""
        self.generated: list[tuple[dict[str, Any], dict[str, str]]] = []
        """Bodies and headers of the requests to generate."""

    async def publish(self, step: int, before: int = -1) -> None:
        """Publish all events after step `before` of the recording, up to step `step`."""
        first, last = frames_after(before), frames_after(step)
        for rank, publisher in self.publishers.items():
            for payload in FRAMES[rank][first[rank] : last[rank]]:
                await publisher.publish(payload)

    async def _answer(self, request: web.Request) -> web.Response:
        if not self.up:
            return web.Response(status=503)
        if request.path == "/metrics":
            self.readings += 1
            return web.Response(text=self.metrics)
        if request.path == "/v1/completions":
            self.generated.append(
                (await request.json(), {name.lower(): value for name, value in request.headers.items()})
            )
            return web.json_response({"choices": []})
        answers = {
            "/v1/models": self.models,
            "/version": RECORDING["version"],
            "/kv_event_sources": self.sources,
        }
        if answers.get(request.path) is None:
            return web.Response(status=404)
        return web.json_response(answers[request.path])


@asynccontextmanager
async def recorded_vllm(*, replay: bool = True, buffer_steps: int = 10_000) -> AsyncIterator[RecordedVllm]:
    """Serve the recording while the context lasts."""
    server, app = RecordedVllm(), web.Application()
    app.router.add_route("*", "/{path:.*}", server._answer)
    context = zmq.asyncio.Context()
    server.publishers = {
        rank: Publisher(context, replay=replay, buffer_steps=buffer_steps) for rank in sorted(FRAMES)
    }
    server.sources = {
        str(rank): {
            **RECORDING["sources"][str(rank)],
            "endpoint": f"tcp://*:{one.port}",
            "replay_endpoint": None if one.replay_port is None else f"tcp://*:{one.replay_port}",
        }
        for rank, one in server.publishers.items()
    }
    serving = [asyncio.create_task(one.serve()) for one in server.publishers.values()]
    try:
        async with served_web(app) as server.url:
            yield server
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        context.destroy(linger=0)
