"""Token frames of a rank (`fleet.completions.token_frames`): each step's tokens for one router in one write,
instead of one write, one task and one JSON event per stream.

Output that a router does not read in time is merged, as `AnswerStream` merges it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerDelta, AnswerStream, GenerationOutcome
from fleet.completions import PromptDetails, Usage
from fleet.completions.token_frames import HEADER, PieceEnd, TokenPiece, encode

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class CarriedAnswer:
    """One answer that travels in frames. `over`: set once its last piece was sent, or it was cancelled."""

    def __init__(self, number: int, answer: AnswerStream) -> None:
        self.number = number
        self.answer = answer
        self.over = asyncio.Event()
        self.error = ""
        """reason to end the answer now"""


class FramesConnection:
    """The frames for one router."""

    def __init__(self) -> None:
        self._carried: set[CarriedAnswer] = set()
        self._changed: dict[CarriedAnswer, None] = {}
        self._news = asyncio.Event()
        self._closing = False

    def carry(self, number: int, answer: AnswerStream, first: AnswerDelta) -> CarriedAnswer:
        """Send an answer from its first delta on, which was read from it."""
        carried = CarriedAnswer(number, answer)
        self._carried.add(carried)
        answer.put_back(first)
        answer.on_news(partial(self._tell, carried))
        self._tell(carried)
        return carried

    def fail(self, carried: CarriedAnswer, error: str) -> None:
        """End an answer with an error."""
        carried.error = error
        self._tell(carried)

    def drop(self, carried: CarriedAnswer) -> None:
        """Send nothing more of an answer."""
        self._carried.discard(carried)
        self._changed.pop(carried, None)
        self._news.set()
        carried.over.set()

    def close(self) -> None:
        """End the connection once it has no answers."""
        self._closing = True
        self._news.set()

    def cancel(self) -> None:
        """Cancel all answers: their router is gone."""
        for carried in list(self._carried):
            carried.answer.cancel()
            self.drop(carried)
        self.close()

    async def run(self, send: Send) -> None:
        """Send frames until `close`."""
        while not self._closing or self._carried:
            await self._news.wait()
            self._news.clear()
            changed, self._changed = self._changed, {}
            pieces = [piece for carried in changed if (piece := _piece(carried)) is not None]
            if pieces:
                await send({"type": "http.response.body", "body": encode(pieces), "more_body": True})
            for carried in changed:
                if carried.answer.over or carried.error:
                    self.drop(carried)

    def _tell(self, carried: CarriedAnswer) -> None:
        if carried in self._carried:
            self._changed[carried] = None
            self._news.set()


class TokenFrames:
    """All frames connections of a rank, by name."""

    def __init__(self) -> None:
        self._connections: dict[str, FramesConnection] = {}

    def of(self, name: str) -> FramesConnection | None:
        """Return an open connection."""
        return self._connections.get(name)

    async def serve(self, receive: Receive, send: Send, stopping: asyncio.Event | None) -> None:
        """Serve one connection until its router closes it, or until the server stops and it has no
        answers. stopping: set when the server stops.
        """
        name, connection = secrets.token_hex(16), FramesConnection()
        headers = [(b"content-type", b"application/x-ndjson"), (HEADER.encode(), name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})
        self._connections[name] = connection
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(_when_gone(receive, connection), name="watches a router's frames")]
            if stopping is not None:
                watches.append(
                    tasks.create_task(_when_stopping(stopping, connection), name="ends a router's frames")
                )
            try:
                await connection.run(send)
            finally:
                del self._connections[name]
                connection.cancel()
                for watch in watches:
                    watch.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _when_gone(receive: Receive, connection: FramesConnection) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    connection.cancel()


async def _when_stopping(stopping: asyncio.Event, connection: FramesConnection) -> None:
    await stopping.wait()
    connection.close()


def _piece(carried: CarriedAnswer) -> TokenPiece | None:
    """Return what an answer has to send now; None: nothing."""
    try:
        delta = carried.answer.take()
    except (EngineFailed, Overloaded, ValueError) as error:
        return TokenPiece(carried.number, [], "", PieceEnd(error=str(error)))
    if delta is None:
        return TokenPiece(carried.number, [], "", PieceEnd(error=carried.error)) if carried.error else None
    end = None
    if delta.outcome is not None:
        end = PieceEnd(finish_reason=delta.outcome.reason, usage=usage(delta.outcome))
    elif carried.error:
        end = PieceEnd(error=carried.error)
    return TokenPiece(carried.number, delta.token_ids, delta.text, end)


def usage(outcome: GenerationOutcome) -> Usage:
    """Return the token counts of a finished request."""
    prompt, completion = outcome.prompt_tokens, outcome.completion_tokens
    details = PromptDetails(cached_tokens=outcome.cached_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=details,
    )
