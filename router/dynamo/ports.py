"""The services that the router needs of Dynamo's runtime. `runtime` provides it; tests provide others."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, MutableMapping
from typing import Any, Protocol

from fleet.completions import ApiError
from router.dynamo.wire.requests import Json
from router.dynamo.workers import RoutedWorker


class CallContext(Protocol):
    """Context of one request on Dynamo's request plane."""

    def id(self) -> str:
        """Return the request's id, which the frontend chose."""
        ...

    def is_stopped(self) -> bool:
        """True once the client has left."""
        ...

    def trace_headers(self) -> "dict[str, str] | None":
        """Return the W3C trace context that came with the request."""
        ...

    @property
    def metadata(self) -> MutableMapping[str, str]:
        """text that travels with the request to the worker"""
        ...


class WorkerCalls(Protocol):
    """Requests to workers, and refusals of requests."""

    async def call(self, worker: RoutedWorker, body: Json, context: Any) -> AsyncIterator[Any]:
        """Send a request to one worker, and return the items of its answer.

        UpstreamFailed, from here or from the iterator, when the worker gives no answer or an incomplete one.
        ApiError 400 when it calls the request invalid.
        """
        ...

    def refusal(self, error: ApiError) -> Exception:
        """Return the exception that gives the frontend's client the right status when a handler raises it."""
        ...

    async def dump(self, worker: RoutedWorker) -> str:
        """Return a dump of the blocks of all ranks of the worker's endpoint (`router.dynamo.wire.recovery`).
        OSError when there is none yet.
        """
        ...


Handler = Callable[[Any, Any], AsyncGenerator[Json, None]]
"""Serves a request: (body, context) to the items of the answer."""


class RecordStore(Protocol):
    """Content of discovery at one time."""

    async def read(self) -> "dict[str, tuple[float, bytes]]":
        """Return the records by key. Each has the time at which its owner last renewed it: seconds, of any
        clock that only grows. OSError when discovery cannot be read.
        """
        ...


class EventFeed(Protocol):
    """Messages of workers, from whichever plane they come."""

    def follow(self, addresses: set[str]) -> None:
        """Receive from these addresses, and from no others. Of no effect where addresses are not needed."""
        ...

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message."""
        ...
