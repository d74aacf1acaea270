"""A server to attack: the HTTP face that routers and ranks have, over an application that remembers what
reached it."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

import deploy.http.server
from deploy.http.limits import HttpLimits
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from tests.hostile.clients import Recorder
from tests.router.conftest import bpe_archive, byte_archive, open_house, serve_rank

__all__ = ["bpe_archive", "byte_archive", "open_house", "serve_rank"]


@dataclass
class Target:
    """What is attacked."""

    url: str
    app: Recorder
    face: HttpServer
    cut: Counter[str] = field(default_factory=Counter)
    """connections that were cut, by cause"""


StartTarget = Callable[..., Awaitable[Target]]


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are kept to a hundredth of a second."""
    monkeypatch.setattr(deploy.http.server, "SWEEP_SECONDS", 0.01)


@pytest.fixture
async def start(quick_sweep: None) -> AsyncIterator[StartTarget]:
    """Start a server: `await start(head_seconds=0.1, ...)`, with these limits and otherwise the default
    ones."""
    async with AsyncExitStack() as stack:

        async def begin(**limits: float) -> Target:
            app, door, cut = Recorder(), listen("127.0.0.1", 0), Counter[str]()
            url = url_of(door)

            def count(cause: str) -> None:
                cut[cause] += 1

            face = await stack.enter_async_context(
                HttpServer(app, door, drain_seconds=1, limits=HttpLimits(**limits), count=count)
            )
            return Target(url, app, face, cut)

        yield begin
