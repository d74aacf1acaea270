"""Slots with fair queueing between clients: a free slot goes to the waiting client that was served least
recently (round robin).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet.completions import ApiError

_RETRY_SECONDS = 2.0


class FairTurns:
    """State: free slots, and queues of waiting jobs by client, in the order of the clients' turns.

    One client may have at most `max_per_client` jobs waiting, all clients together `max_waiting`. Use it on
    one event loop.
    """

    def __init__(self, name: str, slots: int, max_waiting: int, max_per_client: int) -> None:
        """name: plural noun for the jobs in error messages."""
        self._name = name
        self._free = slots
        self._max_waiting = max_waiting
        self._max_per_client = max_per_client
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.waiting = 0

    async def take(self, client: str) -> None:
        """Return with a slot, which `give_back` frees. ApiError 429 when too many jobs of this client wait,
        503 when too many jobs wait in all. A cancelled job leaves its queue.
        """
        if self._free:
            self._free -= 1
            return
        self._refuse(client)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            else:
                self.give_back()
            raise

    def give_back(self) -> None:
        """Free a slot: the client whose turn it is gets it."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            self.waiting -= 1
            if queue:
                self._queues.move_to_end(client)
            else:
                del self._queues[client]
            if not turn.done():  # a done turn was cancelled, and its task has not run since
                turn.set_result(None)
                return
        self._free += 1

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Hold a slot while the context lasts. ApiError as in `take`."""
        await self.take(client)
        try:
            yield
        finally:
            self.give_back()

    def _refuse(self, client: str) -> None:
        if len(self._queues.get(client, ())) >= self._max_per_client:
            message = (
                f"{self._max_per_client} {self._name} of yours wait already; ask again when some of them are"
                " answered"
            )
            raise ApiError(429, message, code="too_many_large_requests", retry_after=_RETRY_SECONDS)
        if self.waiting >= self._max_waiting:
            raise ApiError(
                503,
                f"{self.waiting} {self._name} wait already; ask again",
                code="too_many_large_requests",
                retry_after=_RETRY_SECONDS,
            )

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        queue = self._queues.get(client)
        if queue is None or turn not in queue:
            return  # its turn came after the cancellation, and was passed on
        queue.remove(turn)
        self.waiting -= 1
        if not queue:
            del self._queues[client]
