"""The stream of one worker's answer, read piece by piece."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from router.config import RouterConfig
from router.dynamo.ports import CallContext
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.requests import AnswerPiece, DynamoRequest, read_piece
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed


class SilenceLimit:
    """Time limit of one wait after another, like an `asyncio.timeout` around each, with one timer for all.

    The timer is set anew only when it fires, as most waits are far shorter than their limit: setting and
    cancelling a timer costs more than passing an item on. State: the present wait, and the timer.
    """

    __slots__ = ("_due", "_fires", "_loop", "_task", "_timer", "_too_long")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._fires = 0.0
        """time of the timer, seconds on the loop's clock, like `_due`"""
        self._too_long = False

    def of(self, seconds: float) -> "SilenceLimit":
        """Return a context within which a wait may last this long; then it raises TimeoutError."""
        self._due = self._loop.time() + seconds
        if self._timer is None or self._fires > self._due:
            self.close()
            self._set_timer()
        return self

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._too_long and task is not None:
            self._too_long = False
            if task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _set_timer(self) -> None:
        self._fires = self._due
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next wait sets it
        if self._loop.time() < self._due:
            self._set_timer()
        else:
            self._too_long = True
            self._task.cancel()


class WorkerStream:
    """State: whether it has begun and finished. Use `close` at its end."""

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
        self._items = items
        self._context = context
        self._request = request
        self._emitted = emitted
        self._config = config
        self._finish_reasons = finish_reasons
        self._begun = self._finished = False
        self._limit = SilenceLimit()

    def close(self) -> None:
        """End the timer of a stream that is read no further."""
        self._limit.close()

    async def next(self) -> AnswerPiece | None:
        """Return the next piece; None: the stream has ended. UpstreamFailed when it fails, is silent for too
        long, or ends without a finish reason.
        """
        config = self._config
        try:
            with self._limit.of(config.between_tokens_seconds if self._begun else config.first_token_seconds):
                item = await self._items.__anext__()
        except StopAsyncIteration:
            self._end()
            return None
        except UpstreamFailed:
            if self._context.is_stopped():  # the worker stopped because the client left
                self.left = True
                return None
            raise
        except TimeoutError:
            how = AttemptFailure.STALLED if self._begun else AttemptFailure.FIRST_TOKEN_TIMEOUT
            raise UpstreamFailed(how, "the worker is silent") from None
        return self._read(item)

    def _end(self) -> None:
        if not self._finished:
            self.left = self._context.is_stopped()
            if not self.left:
                raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended without a finish reason")

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
