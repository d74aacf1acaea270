"""Roost between Dynamo's frontend and mockers that find each other by etcd. Needs its program in the PATH."""

import contextlib
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from router.dynamo.stores import EtcdStore
from tests.conftest import free_port
from tests.dynamo.deployment import DynamoDeployment, until
from tests.dynamo.routing import WORKERS, frontend, mocker, roost

ETCD = shutil.which("etcd")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(ETCD is None, reason="there is no etcd in the PATH")]


@pytest_asyncio.fixture
async def by_etcd(tmp_path: Path) -> AsyncIterator[DynamoDeployment]:
    """A deployment whose discovery is an etcd server of its own."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    async with DynamoDeployment(tmp_path, etcd=client) as deployment:
        command = [
            *(str(ETCD), "--data-dir", str(tmp_path / "etcd"), "--name", "one"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"one={peer}"),
        ]
        process = await deployment.start("etcd", command)

        async def healthy() -> bool:
            assert process.process.returncode is None, process.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"{client}/health")).status_code == 200
            return False

        await until(healthy, "etcd answers")
        yield deployment


async def recorded(by_etcd: DynamoDeployment) -> int:
    """Return the number of workers in discovery."""
    stored = await EtcdStore(by_etcd.variables["ETCD_ENDPOINTS"]).read()
    return len([key for key in stored if f"instances/{WORKERS}/backend/generate/" in key])


async def test_workers_are_found_and_a_dead_one_is_left(by_etcd: DynamoDeployment) -> None:
    mockers = [await mocker(by_etcd, number) for number in range(2)]
    url = await roost(by_etcd)
    door = await frontend(by_etcd, workers=0)

    async def known() -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{url}/v1/route", json={"model": "tiny", "prompt": [1, 2, 3]})
            return len(answer.json()["candidates"])

    async def both() -> bool:
        return await known() == 2

    await until(both, "both mockers are known")
    assert await recorded(by_etcd) == 2
    for number in range(6):
        await door.complete([number] * 40, max_tokens=4, ignore_eos=True)
    mockers[0].process.send_signal(signal.SIGKILL)
    for number in range(12):
        found = await door.complete([number] * 40, max_tokens=4, ignore_eos=True)
        assert found["usage"]["completion_tokens"] == 4

    async def left() -> bool:
        return await known() == 1 and await recorded(by_etcd) == 1

    await until(left, "the lease of the dead one has ended")
