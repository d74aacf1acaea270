"""Probes of static backends: a refusal counts at once, silence only after three misses, and a served token is
a sign of life.
"""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Mapping

import pytest

from router.config import RouterConfig
from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.reservations import Reservations
from router.fleet_state.view import FleetView
from router.upstream.rank_client import Upstream
from router.upstream.static_backends import MISSES, StaticBackends

URL = "http://10.0.0.1:8000"
LIST = json.dumps({"data": [{"id": "demo"}]}).encode()
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed")
REFUSED_TWICE = OSError(
    "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed"
    " ('127.0.0.1', 1)"
)


class Scripted(Upstream):
    """Answers probes by a script, one after another, and waits at its end."""

    def __init__(self) -> None:
        self.probes = 0
        self._script: list[bytes | Exception] = []
        self._more, self._over = asyncio.Event(), asyncio.Event()

    async def get(
        self, url: str, path: str, headers: Mapping[str, str], *, seconds: float, max_bytes: int
    ) -> bytes:
        while not self._script:
            self._over.set()
            self._more.clear()
            await self._more.wait()
        self.probes += 1
        answer = self._script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def play(self, *answers: bytes | Exception) -> None:
        """Wait until the probes have consumed all of these, with all consequences."""
        self._script += answers
        self._over.clear()
        self._more.set()
        await self._over.wait()


class Rig:
    def __init__(self) -> None:
        self.view = FleetView(Reservations(settle_seconds=0.1, stale_seconds=5.0))
        self.now = 0.0
        self.upstream = Scripted()
        self.backends = StaticBackends(
            RouterConfig(backends=(URL,)), lambda _: None, self.view, lambda: self.now, self.view.forget
        )

    @property
    def worker(self) -> int:
        (state,) = self.view.engines()
        return state.joined.worker_id

    @property
    def status(self) -> EngineStatus:
        (state,) = self.view.engines()
        return state.status


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    probing = asyncio.create_task(rig.backends.run(rig.upstream, 0.0, 1.0))
    await rig.upstream.play(LIST)
    yield rig
    probing.cancel()
    await asyncio.wait([probing])


async def test_a_server_is_taken_away_after_three_misses_in_a_row(rig: Rig) -> None:
    for answer in [TimeoutError(), OSError("HTTP 500"), LIST] * 2 + [TimeoutError(), b"<html>"]:
        await rig.upstream.play(answer)
        assert rig.status is EngineStatus.LIVE
    await rig.upstream.play(TimeoutError())
    assert MISSES == 3
    assert rig.status is EngineStatus.UNREACHABLE
    await rig.upstream.play(LIST)
    assert rig.status is EngineStatus.LIVE


async def test_served_tokens_outweigh_any_number_of_misses(rig: Rig) -> None:
    for _ in range(10):
        await rig.upstream.play(TimeoutError(), TimeoutError())
        rig.backends.served(rig.worker)
        assert rig.status is EngineStatus.LIVE


async def test_a_token_brings_back_a_server_whose_probes_were_missed(rig: Rig) -> None:
    await rig.upstream.play(*[TimeoutError()] * 5)
    assert rig.status is EngineStatus.UNREACHABLE
    rig.backends.served(rig.worker)
    assert rig.status is EngineStatus.LIVE


@pytest.mark.parametrize("refusal", [REFUSED, REFUSED_TWICE])
async def test_a_refused_connection_takes_a_server_away_at_once_whatever_it_still_serves(
    rig: Rig, refusal: OSError
) -> None:
    await rig.upstream.play(refusal)
    assert rig.status is EngineStatus.UNREACHABLE
    rig.backends.served(rig.worker)
    assert rig.status is EngineStatus.UNREACHABLE
    await rig.upstream.play(LIST)
    assert rig.status is EngineStatus.LIVE


async def test_the_silence_of_a_slow_probe_is_not_that_of_heartbeats(rig: Rig) -> None:
    rig.now = 500.0
    assert rig.view.sweep(rig.now, 3.0, 100.0) == []
    assert rig.status is EngineStatus.LIVE


async def test_a_server_that_stays_away_is_forgotten_and_joins_again(rig: Rig) -> None:
    worker = rig.worker
    await rig.upstream.play(REFUSED)
    rig.now = 500.0
    assert rig.view.sweep(rig.now, 3.0, 100.0) == [worker]
    assert list(rig.view.engines()) == []
    await rig.upstream.play(LIST)
    assert rig.worker == worker
    assert rig.status is EngineStatus.LIVE
