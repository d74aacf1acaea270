"""A router whose output nobody reads goes on serving, says how much of its log is lost, and ends when it is
asked to."""

import asyncio
import fcntl
import os
import signal
import sys

import aiohttp

from deploy.http.sockets import listen, url_of
from tests.conftest import free_port

REQUESTS = 400
"""Lines of some 500 bytes: fifty times what the pipes hold."""


async def test_a_router_whose_stdout_and_stderr_are_full_serves_and_stops() -> None:
    """Before, the request that filled the pipe was the last that was answered, /health included."""
    with listen("127.0.0.1", 0) as door:
        address = url_of(door)
    pipes = [os.pipe(), os.pipe()]
    for _, end in pipes:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    command = ["router", "--backend", f"http://127.0.0.1:{free_port()}", "--port", address.rpartition(":")[2]]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from deploy.cli import main; main()", *command),
        stdout=pipes[0][1],
        stderr=pipes[1][1],
    )
    for _, end in pipes:
        os.close(end)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http:
            async with asyncio.timeout(30):
                while not await _answers(http, address):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            for _ in range(REQUESTS):
                async with http.post(
                    f"{address}/v1/chat/completions", json={"model": "m", "messages": []}
                ) as refused:
                    assert refused.status in (400, 503)  # it depends on how much is known of the server
            assert await _answers(http, address)
            lines = [b""]
            async with asyncio.timeout(20):
                while not (lines[0].startswith(b'{"time"') and lines[-1] == b""):
                    lines = await asyncio.to_thread(_read_lines, pipes[0][0], REQUESTS)
            assert (
                len(lines) == REQUESTS + 1
            )  # a bound of megabytes is not reached yet: nothing is lost once it is read
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0  # standard error is still full
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for end, _ in pipes:
            os.close(end)


def _read_lines(descriptor: int, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        data += os.read(descriptor, 65536)
    return data.split(b"\n")


async def _answers(http: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with http.get(f"{address}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False
