"""The stream of one worker's answer, read ahead of the frontend."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from router.config import RouterConfig
from router.dynamo.ports import CallContext
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.requests import AnswerPiece, DynamoRequest, read_piece, take_joined
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed

AHEAD = 32
"""Pieces that may wait for the frontend. Then the worker waits."""


class WorkerStream:
    """A task reads the worker's items while earlier ones are on their way to the frontend: on both sides each
    item takes a switch to Dynamo's threads and back, and these overlap. Use `close` at its end.

    State: pieces read ahead, the end of the stream, and one timer for the worker's silence. The timer is set
    anew only when it fires, because setting and cancelling one for each item costs more than passing it on.
    """

    left = False
    """the client went before the end"""

    def __init__(
        self,
        items: AsyncIterator[Any],
        context: CallContext,
        request: DynamoRequest,
        emitted: int,
        config: RouterConfig,
        finish_reasons: list[str],
    ) -> None:
        """emitted: tokens of the answer from earlier workers. finish_reasons: gets that of this worker."""
        self._context = context
        self._request = request
        self._emitted = emitted
        self._config = config
        self._finish_reasons = finish_reasons
        self._begun = self._finished = self._over = False
        self._error: Exception | None = None
        self._pieces: deque[AnswerPiece] = deque()
        self._news: asyncio.Future[None] | None = None
        """of a reader that waits for a piece"""
        self._room: asyncio.Future[None] | None = None
        """of the task while AHEAD pieces wait"""
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + config.first_token_seconds
        """time by which the next item must have come"""
        self._timer = self._loop.call_at(self._due, self._look)
        self._task = self._loop.create_task(self._read_ahead(items), name="reads a worker's answer")

    def close(self) -> None:
        """Read no further."""
        self._timer.cancel()
        self._task.cancel()

    async def next(self) -> AnswerPiece | None:
        """Return the next piece, joined with those that wait behind it if the request allows it. None: the
        stream has ended. UpstreamFailed: it fails, is silent for too long, or ends without a finish reason.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._news = self._loop.create_future()
            await self._news
        _wake(self._room)
        return take_joined(self._pieces) if self._request.joinable else self._pieces.popleft()

    async def _read_ahead(self, items: AsyncIterator[Any]) -> None:
        seconds = self._config.between_tokens_seconds
        try:
            async for item in items:
                first = not self._begun
                self._pieces.append(self._read(item))
                _wake(self._news)
                if len(self._pieces) >= AHEAD:
                    self._room = self._loop.create_future()
                    await self._room
                    self._room = None
                self._due = self._loop.time() + seconds
                if first:  # the timer waits for the first token, perhaps for longer
                    self._timer.cancel()
                    self._timer = self._loop.call_at(self._due, self._look)
            self._end()
        except UpstreamFailed as error:
            self.left = self._context.is_stopped()  # then the worker stopped because the client left
            self._error = None if self.left else error
        except Exception as error:  # noqa: BLE001 it is raised where the pieces are read
            self._error = error
        finally:
            self._over = True
            _wake(self._news)

    def _end(self) -> None:
        if not self._finished and not self._context.is_stopped():
            raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended without a finish reason")
        self.left = not self._finished

    def _read(self, item: Any) -> AnswerPiece:
        request = self._request
        try:
            piece = read_piece(
                item, self._emitted, len(request.token_ids), wants_experts=request.wants_experts
            )
        except Malformed as error:
            raise UpstreamFailed(AttemptFailure.BROKEN, str(error)) from error
        if piece.failure is not None:
            raise UpstreamFailed(AttemptFailure.SERVER_ERROR, piece.failure)
        self._begun = True
        if piece.finished and not self._finished:
            self._finished = True
            self._finish_reasons.append(str(piece.item.get("finish_reason")))
        return piece

    def _look(self) -> None:
        """End a stream that has been silent for too long."""
        now = self._loop.time()
        if self._room is not None:  # the frontend is slow, not the worker
            self._due = now + self._config.between_tokens_seconds
        if now < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
        elif not self._over:
            how = AttemptFailure.STALLED if self._begun else AttemptFailure.FIRST_TOKEN_TIMEOUT
            self._error = UpstreamFailed(how, "the worker is silent")
            self._task.cancel()


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
