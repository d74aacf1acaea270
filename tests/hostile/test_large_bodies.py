"""Bodies that take long to decode, render or tokenise: the loop's thread does next to nothing of it, and
others do not wait for it."""

import asyncio
import contextlib
import gc
import http.client
import http.server
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from fleet.completions import ApiError
from fleet.facts.engines import Capabilities
from router.bodies.tasks import PromptBounds
from router.bodies.worker_pool import BodyWorkers
from router.config import BackendConfig
from tests.router.conftest import bpe_archive, byte_archive, open_house, serve_rank
from tests.router.router_fixture import House, MockRank, OpenHouse, Serve, archive, bpe, chat, until

__all__ = ["bpe_archive", "byte_archive", "open_house", "serve_rank"]
CHAT, TEXT, ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/route"
LARGE = 7_900_000
"""bytes; 8 MiB is the limit"""
MOST_CALLBACK_SECONDS = 0.04
"""Processor time of the loop's thread in one callback; before bodies were read elsewhere some of these took
0.1 to 0.5 s."""
MOST_PROCESS_SECONDS = 1.0
"""Processor time of all threads of the router's process for one body, its client among them; tokenising one
of these takes several."""
ROOT = Path(__file__).resolve().parents[2]


class CallbackTimes:
    """The processor time that the longest callback of the event loop took in its thread."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.what = ""


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallbackTimes]:
    gc.collect()
    gc.freeze()  # as the router does when it has started: collections of all that the tests have made are not its own
    times, run = CallbackTimes(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        seconds = time.thread_time() - started
        if seconds > times.longest:
            times.longest, times.what = seconds, repr(handle)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    yield times
    gc.unfreeze()


def user(text: str) -> bytes:
    return json.dumps(
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    ).encode()


def words(size: int) -> str:
    chance = random.Random(1)
    return " ".join("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(size // 9))


def tiny_messages(count: int) -> bytes:
    return b'{"model": "demo", "messages": [' + b",".join([b'{"role":"user","content":"a"}'] * count) + b"]}"


def prompts(one: bytes) -> bytes:
    return b'{"model": "demo", "prompt": [' + (one + b",") * (5_200_000 // len(one + b",")) + one + b"]}"


def empty_lists() -> bytes:
    return b'{"model": "demo", "max_tokens": 1, "prompt": "a", "x": [' + b"[]," * 2_600_000 + b"[]]}"


ATTACKS: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "one word": (CHAT, lambda: user("a" * LARGE), 400),
    "special tokens": (CHAT, lambda: user("<eos>" * (LARGE // 5)), 400),
    "distinct words": (CHAT, lambda: user(words(LARGE)), 400),
    "tiny messages": (CHAT, lambda: tiny_messages(130_000), 400),
    "ids": (TEXT, lambda: prompts(b"7"), 400),
    "prompts": (TEXT, lambda: prompts(b'"a"'), 400),
    "empty lists": (TEXT, empty_lists, 200),
}
"""path, body and status; bodies are made when they are sent, as megabytes take their time"""


def post(house: House, path: str, body: bytes, source: str = "127.0.0.1") -> tuple[int, dict[str, Any]]:
    """A request from a thread of its own, whose processor time is not the loop's."""
    connection = http.client.HTTPConnection(
        urlsplit(house.url).netloc, timeout=60, source_address=(source, 0)
    )
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


async def attacked(
    house: House, path: str, body: bytes, callbacks: CallbackTimes
) -> tuple[int, dict[str, Any]]:
    await asyncio.to_thread(
        post, house, "/v1/route/release", b'{"id": "whatever is made at the first request is made now"}'
    )
    callbacks.longest, spent = 0.0, time.process_time()
    status, answer = await asyncio.to_thread(post, house, path, body)
    assert callbacks.longest < MOST_CALLBACK_SECONDS, callbacks.what
    assert time.process_time() - spent < MOST_PROCESS_SECONDS
    return status, answer


@pytest.mark.parametrize("attack", ATTACKS)
async def test_no_body_keeps_the_loop(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes, callbacks: CallbackTimes, attack: str
) -> None:
    house, rank = await open_house(), await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    path, made, expected = ATTACKS[attack]
    body = made()
    for door in (path, ROUTE):
        status, answer = await attacked(house, door, body, callbacks)
        assert status == expected, answer
        if attack in ("one word", "special tokens", "distinct words", "ids"):
            assert answer["error"]["code"] == "context_length_exceeded"
            assert answer["error"]["message"].startswith(
                "This model's maximum context length is 4096 tokens. However, "
            )


class _Served(http.server.BaseHTTPRequestHandler):
    """A server that is asked in text, in threads of its own."""

    bodies: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "demo", "owned_by": "vllm"}]}')

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        streamed = b'"stream": true' in self.bodies[-1][:100]
        self._answer(
            b"data: [DONE]\n\n" if streamed else b'{"choices": []}',
            "text/event-stream" if streamed else "application/json",
        )

    def _answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def text_server() -> Iterator[str]:
    """The URL of one; `_Served.bodies` is what it was asked."""
    _Served.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("attack", ["distinct words", "tiny messages", "empty lists"])
async def test_no_body_keeps_the_loop_before_servers_that_are_asked_in_text(
    open_house: OpenHouse, text_server: str, callbacks: CallbackTimes, attack: str
) -> None:
    house = await open_house(backends=(text_server,), bus=False)
    await until(lambda: house.service.ready)
    path, made, _ = ATTACKS[attack]
    body = made()
    assert (await attacked(house, path, body, callbacks))[0] == 200
    assert _Served.bodies == [body]
    assert (await attacked(house, ROUTE, body, callbacks))[0] == 200


async def test_a_salt_is_not_written_on_the_loop_into_a_large_body_that_names_one(
    open_house: OpenHouse, text_server: str, callbacks: CallbackTimes
) -> None:
    house = await open_house(
        named_backends=(BackendConfig(name="one", url=text_server, isolates_tenants=True),), bus=False
    )
    await until(lambda: house.service.ready)
    fields = b",".join(b'"field %d": 0' % number for number in range(400_000))
    body = b'{"model": "demo", "prompt": "a", "cache_salt": "mine", ' + fields + b"}"
    assert (await attacked(house, TEXT, body, callbacks))[0] == 200
    assert json.loads(_Served.bodies[0]) == json.loads(body)


async def test_a_large_stream_from_a_server_that_returns_ids_is_not_read_on_the_loop_either(
    open_house: OpenHouse, text_server: str, callbacks: CallbackTimes
) -> None:
    house = await open_house(backends=(text_server,), bus=False)
    await until(lambda: house.service.ready)
    body = b'{"model": "demo", "stream": true, "prompt": "a", "x": [' + b"[]," * 2_600_000 + b"[]]}"
    connection = http.client.HTTPConnection(urlsplit(house.url).netloc, timeout=60)

    def streamed() -> bytes:
        with contextlib.closing(connection):
            connection.request("POST", TEXT, body, {"content-type": "application/json"})
            return connection.getresponse().read()

    assert await asyncio.to_thread(streamed) == b"data: [DONE]\n\n"
    assert callbacks.longest < MOST_CALLBACK_SECONDS, callbacks.what
    assert _Served.bodies == [body]


async def test_a_large_prompt_that_fits_has_the_ids_of_the_same_prompt_in_a_small_body(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes
) -> None:
    house, rank = await open_house(large_body_bytes=2000), await serve_rank(MockRank(bpe_archive))
    await house.join("alone", [rank.url], bpe_archive)
    messages = [
        {"role": "user", "content": "words in a row; naïve façade, 東京タワー 🐣 " * 12},
        {"role": "user", "content": "hi"},
    ]
    bodies = [chat(messages=messages, **extra) for extra in ({}, {"x": "y" * 3000})]
    answers = [await house.post(CHAT, body) for body in bodies]
    texts = [
        await house.post(
            TEXT, {"model": "demo", "max_tokens": 3, "prompt": ["some text", "another"], **extra}
        )
        for extra in ({}, {"x": "y" * 3000})
    ]
    assert [answer.status for answer in answers + texts] == [200] * 4
    small, large, *prompts = [request.prompt for request in rank.requests]
    assert small == large
    assert sorted(map(tuple, prompts[:2])) == sorted(map(tuple, prompts[2:]))
    assert answers[0].json["choices"] == answers[1].json["choices"]
    assert house.service.bodies.workers.started == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 7.0}, "temperature"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"messages": []}, "messages"),
        ({"max_tokens": "x" * 500_000}, "max_tokens"),
        ({"logit_bias": {str(number): 1.0 for number in range(50_000)}}, "logit_bias"),
        ({"tools": [{"type": "function"}] * 20_000}, "tools"),
        ({"seed": 10**40}, "seed"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"min_tokens": 5}, "min_tokens"),
        (
            {"chat_template_kwargs": {**{f"n{at}": at for at in range(63)}, "bos_token": "x"}},
            "chat_template_kwargs.bos_token",
        ),
        (
            {"chat_template_kwargs": {**{f"n{at}": at for at in range(64)}, "bos_token": "x"}},
            "chat_template_kwargs",
        ),
    ],
)
async def test_a_large_body_is_refused_for_what_is_wrong_with_it(
    open_house: OpenHouse, byte_archive: bytes, change: dict[str, Any], param: str
) -> None:
    house = await open_house()
    await house.join("alone", ["http://127.0.0.1:1"], byte_archive)
    answer = await house.post(CHAT, chat(**{"padding": "x" * 200_000, **change}))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert len(answer.body) < 10_000


async def test_a_release_that_is_longer_than_any_can_be_is_refused_unread(
    open_house: OpenHouse, callbacks: CallbackTimes
) -> None:
    house = await open_house()
    status, _ = await attacked(
        house, "/v1/route/release", b'{"id": "a", "x": [' + b"[]," * 2_000_000 + b"[]]}", callbacks
    )
    assert status == 413


async def test_fields_of_a_large_body_go_on_to_engines_that_take_them(
    open_house: OpenHouse, serve_rank: Serve, bpe_archive: bytes, callbacks: CallbackTimes
) -> None:
    house, rank = await open_house(), await serve_rank(MockRank(bpe_archive))
    await house.join(
        "vllm", [rank.url], bpe_archive, capabilities=Capabilities(kv_events=False, passes_fields=True)
    )
    lists = b"[" + b"[]," * 250_000 + b"[]]"
    status, _ = await attacked(
        house, CHAT, json.dumps(chat(min_p=0.5)).encode()[:-1] + b', "vendor": ' + lists + b"}", callbacks
    )
    assert status == 200
    assert b'"vendor":' + lists in rank.bodies[0]
    assert b'"min_p":0.5' in rank.bodies[0]


# The processes


ARCHIVE = archive(bpe(257), {"chat_template": "{{ messages[0]['content'] }}"})
HOURS = PromptBounds(context=10**9, prompts=1)
LONG = user("ab " * 2_500_000)
"""takes seconds to tokenise"""
BUSY_SECONDS = 0.4
"""Processor time of a process that has started and works on its task."""


@contextlib.asynccontextmanager
async def workers(processes: int = 1, memory_bytes: int = 4 * 2**30, per_client: int = 4):
    async with BodyWorkers(
        processes,
        8,
        per_client,
        memory_bytes=memory_bytes,
        seen_bytes=0,
        archive=lambda digest: ARCHIVE,
        digests=lambda: ("d",),
    ) as started:
        yield started


def children(parent: int) -> list[int]:
    """Worker processes of a process."""
    return [
        int(pid)
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if b"router.bodies.worker" in command(int(pid))
    ]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def running(pool: BodyWorkers, client: str = "a") -> "asyncio.Task[Any]":
    """A task that will run for long, in its process by now."""
    task = asyncio.create_task(pool.encode(client, "chat", LONG, "d", HOURS))
    await until(lambda: any(processor_seconds(pid) > BUSY_SECONDS for pid in children(os.getpid())), 20.0)
    return task


def processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_process_that_is_killed_in_the_middle_fails_its_request_alone_and_is_replaced() -> None:
    async with workers() as pool:
        task = await running(pool)
        os.kill(children(os.getpid())[0], signal.SIGKILL)
        with pytest.raises(ApiError) as failed:
            await task
        assert (failed.value.status, pool.died) == (503, 1)
        assert (await pool.read("a", "chat", user("hi"))).model == "demo"
    assert children(os.getpid()) == []


async def test_the_work_of_a_client_that_leaves_is_dropped_whether_it_waits_or_runs() -> None:
    async with workers() as pool:
        task = await running(pool)
        pid, waiting = (
            children(os.getpid())[0],
            [asyncio.create_task(pool.read("a", "chat", user(f"{at}"))) for at in range(3)],
        )
        other = asyncio.create_task(pool.read("b", "chat", user("mine")))
        await until(lambda: pool.waiting == 4)
        for one in (task, *waiting):
            one.cancel()
        assert (await other).model == "demo"
        assert (pool.waiting, command(pid), pool.started) == (0, b"", 2)


async def test_a_large_request_does_not_wait_for_the_huge_ones_of_others() -> None:
    async with workers(processes=2, per_client=8) as pool:
        huge = [await running(pool)] + [
            asyncio.create_task(pool.encode("a", "chat", LONG, "d", HOURS)) for _ in range(3)
        ]
        await asyncio.wait_for(pool.encode("b", "chat", user("x" * 200_000), "d", HOURS), 10.0)
        assert not any(one.done() for one in huge)
        for one in huge:
            one.cancel()


async def test_a_body_that_needs_more_memory_than_a_process_has_is_refused_and_the_next_is_served() -> None:
    async with workers(memory_bytes=170 * 2**20) as pool:
        lists = (
            b'{"model": "demo", "messages": [{"role": "user", "content": [' + b"[[[]]]," * 600_000 + b"[]]}]}"
        )
        with pytest.raises(ApiError) as refused:
            await pool.read("a", "chat", lists)
        assert (refused.value.status, pool.died) == (413, 0)
        assert (await pool.read("a", "chat", user("hi"))).model == "demo"


ROUTER = f"""
import asyncio
from router.bodies.worker_pool import BodyWorkers
from router.bodies.tasks import PromptBounds

ARCHIVE = {ARCHIVE!r}

async def main():
    body = b'{{"model": "demo", "messages": [{{"role": "user", "content": "' + b"ab " * 2_500_000 + b'"}}]}}'
    workers = BodyWorkers(1, 8, 8, memory_bytes=2**32, seen_bytes=0, archive=lambda digest: ARCHIVE, digests=lambda: ("d",))
    async with workers:
        await workers.encode("a", "chat", body, "d", PromptBounds(10**9, 1))

asyncio.run(main())
"""
"""A process that has a long task done."""


def test_processes_end_with_a_router_that_is_killed() -> None:
    router = subprocess.Popen(
        [sys.executable, "-c", ROUTER], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 20
    while not any(processor_seconds(pid) > BUSY_SECONDS for pid in children(router.pid)):
        assert router.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = children(router.pid)
    router.kill()
    router.wait()
    while any(map(command, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Memory


def withholding(house: House, size: int, source: str = "127.0.0.1") -> socket.socket:
    """A client that sends a body but for its last byte."""
    netloc = urlsplit(house.url)
    client = socket.create_connection(
        (netloc.hostname or "", netloc.port or 0), timeout=10, source_address=(source, 0)
    )
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
        + b" " * (size - 1)
    )
    return client


async def test_clients_that_withhold_the_last_byte_hold_no_more_than_their_share(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house, rank = await open_house(bodies_bytes=4_000_000), await serve_rank(MockRank(byte_archive))
    await house.join("alone", [rank.url], byte_archive)
    budget = house.service.body_budget
    clients = []
    for _ in range(3):
        clients.append(await asyncio.to_thread(withholding, house, 600_000))
        await until(lambda: budget.held >= 599_999 * len(clients))
    refused, answer = await asyncio.to_thread(post, house, CHAT, user("x" * 600_000))
    assert (refused, answer["error"]["code"]) == (503, "bodies_full")
    assert budget.held <= budget.total / 2
    assert (await asyncio.to_thread(post, house, CHAT, user("hello"), "127.0.0.2"))[0] == 200
    for client in clients:
        client.close()
    await until(lambda: budget.held == 0)
    while b'roost_router_bodies_total{event="refused"} 1.0' not in (await house.get("/metrics")).body:  # noqa: ASYNC110 set a few times a second
        await asyncio.sleep(0.01)


async def test_a_body_of_unknown_length_is_cut_as_soon_as_there_is_no_memory_for_it(
    open_house: OpenHouse, byte_archive: bytes
) -> None:
    house = await open_house(bodies_bytes=1_000_000)
    await house.join("alone", ["http://127.0.0.1:1"], byte_archive)

    def chunked() -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(urlsplit(house.url).netloc, timeout=10)
        with contextlib.suppress(ConnectionError):
            connection.request(
                "POST",
                CHAT,
                iter([b" " * 50_000] * 40),
                {"transfer-encoding": "chunked"},
                encode_chunked=True,
            )
        with contextlib.closing(connection):
            return connection.getresponse()

    answer = await asyncio.to_thread(chunked)
    assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (503, "close", "2")
    assert house.service.body_budget.held == 0
