"""`roost router --gateway` as a process, asked by a proxy."""

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from deploy.local.parent_death import wrapped
from router.gateway.messages import HealthCheckRequest, HealthCheckResponse
from router.gateway.server import EXT_PROC, HEALTH
from tests.router.foreign_servers import ForeignServer, saying, serving
from tests.router.gateway.proxy import Proxy
from tests.router.router_fixture import chat

ROOT = Path(__file__).parents[3]
START_SECONDS = 60
ANSWER = json.dumps({"id": "x", "choices": []}).encode()


async def _ready(channel: grpc.aio.Channel) -> None:
    """Wait until the picker serves."""
    check = channel.unary_unary(f"/{HEALTH}/Check")
    asked = HealthCheckRequest(service=EXT_PROC).SerializeToString()
    async with asyncio.timeout(START_SECONDS):
        while HealthCheckResponse.FromString(await check(asked, wait_for_ready=True)).status != 1:  # noqa: ASYNC110 another process
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_router_picks_for_a_gateway_and_ends_once_open_answers_have_ended(
    tmp_path: Path, free_tcp_port: int, unused_tcp_port: int
) -> None:
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "router"]
    command += ["--port", str(free_tcp_port), "--gateway", f"127.0.0.1:{unused_tcp_port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    async with serving(ForeignServer("one", saying({}))) as server:
        process = await asyncio.create_subprocess_exec(
            *wrapped([*command, "--backend", server.url], os.getpid()), cwd=tmp_path, env=environment
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
            await _ready(channel)
            exchange = Proxy(channel).open()
            picked = await exchange.ask(json.dumps(chat()).encode())
            assert f"http://{picked.endpoint}" == server.url
            process.terminate()
            done, _ = await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=0.5)
            assert not done
            assert await exchange.report(200, "application/json", [ANSWER]) == ANSWER
            async with asyncio.timeout(START_SECONDS):
                assert await process.wait() == 0
