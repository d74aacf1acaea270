"""The HTTP face of a rank: OpenAI's forms, refusals that name the field, clients that vanish or read
slowly."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.serving.authentication import RouterAuthentication
from engine_adapter.serving.http import MAX_BODY_BYTES, RankApp
from fleet.completions import Completion

Starter = Callable[..., AbstractAsyncContextManager[Any]]

PROMPT = "a prompt of more than two blocks of tokens"
IDS = list(PROMPT.encode())


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://rank", timeout=10
    ) as client:
        yield client


@pytest.fixture
async def served(pretend_engine: Starter) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    async with pretend_engine() as started, client_of(RankApp(started.engine)) as client:
        yield client, started


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0} | body)


def events_of(response: httpx.Response) -> list[Completion]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: "), type=Completion) for line in lines]


async def test_a_whole_answer_has_text_reason_and_usage(served: tuple[httpx.AsyncClient, Any]) -> None:
    client, started = served
    response = await complete(client, max_tokens=12)
    answer = msgspec.json.decode(response.content, type=Completion)
    assert response.status_code == 200
    assert answer.choices[0].text == bytes(started.runner.alone(IDS, 12)).decode()
    assert (answer.choices[0].finish_reason, answer.choices[0].token_ids, answer.model) == (
        "length",
        None,
        "pretend",
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(IDS),
        12,
        len(IDS) + 12,
    )
    again = msgspec.json.decode((await complete(client, max_tokens=12)).content, type=Completion)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 32


async def test_a_stream_says_every_id_and_its_text_once(served: tuple[httpx.AsyncClient, Any]) -> None:
    client, started = served
    options = {"include_usage": True}
    response = await complete(
        client, prompt=IDS, max_tokens=12, stream=True, return_token_ids=True, stream_options=options
    )
    *chunks, usage = events_of(response)
    alone = started.runner.alone(IDS, 12)
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids or []] == alone
    assert "".join(chunk.choices[0].text for chunk in chunks) == bytes(alone).decode()
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in [*chunks, usage]}) == 1


async def test_ids_are_said_also_while_their_text_is_held_back(served: tuple[httpx.AsyncClient, Any]) -> None:
    client, started = served
    alone = bytes(started.runner.alone(IDS, 12)).decode()
    never = alone[3:6] + "~"
    reported = events_of(
        await complete(client, max_tokens=12, stream=True, return_token_ids=True, stop=never)
    )
    assert sum(len(chunk.choices[0].token_ids or []) for chunk in reported) == 12
    assert "".join(chunk.choices[0].text for chunk in reported) == alone
    quiet = events_of(await complete(client, max_tokens=12, stream=True, stop=never))
    assert all(chunk.choices[0].text or chunk.choices[0].finish_reason for chunk in quiet)


async def test_log_probabilities_come_in_parallel_lists_with_offsets(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, started = served
    whole = msgspec.json.decode(
        (await complete(client, max_tokens=5, logprobs=3)).content, type=Completion
    ).choices[0]
    streamed = events_of(await complete(client, max_tokens=5, logprobs=3, stream=True))
    assert whole.logprobs is not None
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert [len(top) for top in whole.logprobs.top_logprobs] == [3] * 5
    for token, value, top in zip(
        whole.logprobs.tokens, whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True
    ):
        assert max(top.values()) == top[token] == value <= 0
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [
        value for piece in pieces if piece is not None for value in piece.token_logprobs
    ] == pytest.approx(whole.logprobs.token_logprobs)
    assert [at for piece in pieces if piece is not None for at in piece.text_offset] == [0, 1, 2, 3, 4]
    chosen_only = msgspec.json.decode(
        (await complete(client, max_tokens=2, logprobs=0)).content, type=Completion
    ).choices[0]
    assert chosen_only.logprobs is not None
    assert chosen_only.logprobs.top_logprobs == [{}, {}]
    assert started.runner.steps > 0


async def test_a_continuation_says_only_what_is_new_and_counts_the_clients_own_prompt(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, started = served
    alone = started.runner.alone(IDS, 12)
    response = await complete(client, prompt=IDS + alone[:5], emitted=5, max_tokens=7, return_token_ids=True)
    answer = msgspec.json.decode(response.content, type=Completion)
    assert answer.choices[0].token_ids == alone[5:]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), 7)


@pytest.mark.parametrize(
    ("header", "decision"),
    [
        ({"x-roost-decision-id": "d-1 (second try)"}, "d-1 (second try)"),
        ({"X-Roost-Decision-Id": "~" * 64}, "~" * 64),
        ({}, ""),
    ]
    + [
        ({"x-roost-decision-id": value}, "")
        for value in (b"", b"~" * 65, b"two\tparts", "größer".encode(), b"\x7f")
    ],
)
async def test_a_request_is_reported_under_the_decision_it_names_unless_that_is_no_id(
    served: tuple[httpx.AsyncClient, Any], header: dict[str, Any], decision: str
) -> None:
    client, started = served
    response = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers=header)
    assert response.status_code == 200
    async with asyncio.timeout(5):
        while not (ended := started.engine.take_facts().ended):
            await started.engine.wait_facts()
    assert [one.decision for one in ended] == [decision]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["two", "prompts"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 256]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"emitted": -1}, "emitted"),
        ({"emitted": 1}, "emitted"),
        ({"prompt": [1, 2], "emitted": 2}, "emitted"),
        ({"seed": 1.5}, "seed"),
    ],
)
async def test_a_field_out_of_range_is_a_400_that_names_it(
    served: tuple[httpx.AsyncClient, Any], body: dict[str, Any], field: str
) -> None:
    client, _ = served
    response = await complete(client, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["message"].count("`") % 2 == 0, "msgspec's place is cut off whole"


async def test_numbers_of_any_size_are_taken_where_they_make_sense(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, _ = served
    assert (await complete(client, seed=2**70, temperature=1, top_k=10**30, max_tokens=2)).status_code == 200
    assert (await complete(client, seed=-3, temperature=1e-300, max_tokens=2)).status_code == 200
    assert (await complete(client, max_tokens=10**30)).json()["error"]["code"] == "context_length_exceeded"
    assert (await complete(client, prompt=[2**64])).status_code == 400


NO_REQUESTS = {
    "nothing": b"",
    "half": b"{",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "a list": b"[]",
    "zeros": b"\x00" * 10,
    "no prompt": b'{"max_tokens": 3}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "beyond floats": b'{"prompt": "a", "temperature": 1e400}',
    "a pit": b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


async def test_a_prompt_under_another_cache_salt_is_computed_anew(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, _ = served
    cached = []
    for salt in ({"cache_salt": "ours"}, {"cache_salt": "ours"}, {"cache_salt": "theirs"}, {}):
        usage = (await complete(client, prompt=[66] * 40, **salt)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 0, 0]


@pytest.mark.parametrize("body", NO_REQUESTS.values(), ids=NO_REQUESTS)
async def test_a_body_that_is_no_request_is_a_400(served: tuple[httpx.AsyncClient, Any], body: bytes) -> None:
    client, _ = served
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_request_beyond_the_context_is_refused_with_both_numbers_but_a_default_length_is_clipped(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, _ = served
    for body, numbers in (
        ({"prompt": [65] * 500, "max_tokens": 13}, ("500", "513", "512")),
        ({"prompt": [65] * 512}, ("512",)),
    ):
        response = await complete(client, **body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert all(number in error["message"] for number in numbers)
    clipped = msgspec.json.decode((await complete(client, prompt=[65] * 505)).content, type=Completion)
    assert clipped.usage is not None
    assert clipped.usage.completion_tokens == 7


async def test_wrong_places_models_and_sizes_have_their_own_status(
    served: tuple[httpx.AsyncClient, Any],
) -> None:
    client, _ = served
    unknown = await complete(client, model="other")
    assert (unknown.status_code, unknown.json()["error"]["code"], unknown.json()["error"]["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert (await client.get("/v1/nowhere")).status_code == 404
    assert (await client.get("/v1/completions")).status_code == 405
    large = await client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert large.status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 1024 * 1024

    assert (await client.post("/v1/completions", content=pieces())).status_code == 413


async def test_a_long_text_prompt_is_served_like_its_ids(pretend_engine: Starter) -> None:
    async with (
        pretend_engine(context=9000, kv_blocks=600, max_batch_tokens=4096) as started,
        client_of(RankApp(started.engine)) as client,
    ):
        text = "ab" * 2500
        answer = msgspec.json.decode(
            (await complete(client, prompt=text, max_tokens=2, return_token_ids=True)).content,
            type=Completion,
        )
        assert answer.choices[0].token_ids == started.runner.alone(list(text.encode()), 2)


async def test_models_and_health_are_told_until_the_engine_fails(pretend_engine: Starter) -> None:
    async with pretend_engine() as started, client_of(RankApp(started.engine)) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("pretend", 512)
        started.runner.failure = ArithmeticError("no numbers")
        broken = await complete(client)
        assert (broken.status_code, broken.json()["error"]["code"], broken.headers["retry-after"]) == (
            503,
            "engine_failed",
            "1",
        )
        assert (await client.get("/health")).status_code == 503
        assert (await complete(client)).status_code == 503


async def test_a_rank_with_a_secret_answers_routers_and_tells_strangers_only_that_it_lives(
    pretend_engine: Starter, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("the-secret-of-the-fleet\n")
    admission = RouterAuthentication(tmp_path / "secret")
    async with pretend_engine() as started, client_of(RankApp(started.engine, None, admission)) as client:
        for path in ("/v1/models", "/v1/completions", "/nowhere"):
            for header in ({}, {"authorization": "Bearer the-secret-of-the-flee"}):
                refused = await client.get(path, headers=header)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await complete(client)).status_code == 401
        assert (await client.get("/health")).json() == {"status": "ok"}
        client.headers["authorization"] = "Bearer the-secret-of-the-fleet"
        assert (await complete(client)).status_code == 200
        started.runner.failure = ArithmeticError("no numbers")
        assert (await complete(client)).status_code == 503
        health = await client.get("/health", headers={"authorization": ""})
        assert (health.status_code, "numbers" in health.text) == (503, False)


async def test_a_full_queue_is_a_503_with_retry_after(pretend_engine: Starter) -> None:
    async with (
        pretend_engine(max_running=1, max_waiting=1) as started,
        client_of(RankApp(started.engine)) as client,
    ):
        started.runner.hold = threading.Event()
        busy = [await started.engine.submit(GenerationRequest(prompt=IDS, max_tokens=2)) for _ in range(2)]
        refused = await complete(client)
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (
            503,
            "overloaded",
            "1",
        )
        started.runner.hold.set()
        assert [len([delta async for delta in answer]) > 0 for answer in busy] == [True, True]


class Client:
    """One ASGI request by hand: the client may read slowly, or vanish."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[dict[str, Any]] = []
        self.first = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        self.scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.first.set()
        await self.reads.wait()

    def text(self) -> str:
        lines = b"".join(message.get("body", b"") for message in self.sent).decode().split("\n\n")
        events = [
            json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"
        ]
        return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_vanishes_frees_everything_at_once(pretend_engine: Starter, stream: bool) -> None:
    async with pretend_engine() as started:
        client = Client({"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": stream})
        app = RankApp(started.engine)
        started.runner.hold = threading.Event()
        serving = asyncio.create_task(app(client.scope, client.receive, client.send))
        started.runner.hold.set()
        if stream:
            await client.first.wait()
        else:
            await started.engine.wait_facts()
        client.gone.set()
        async with asyncio.timeout(2):
            await serving
            while (load := started.engine.take_facts().load).running or load.decode_blocks:
                await started.engine.wait_facts()
        assert started.runner.steps < 400


async def test_a_client_that_reads_slowly_stops_nobody_and_misses_nothing(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        app = RankApp(started.engine)
        slow = Client({"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True})
        slow.reads.clear()
        serving = asyncio.create_task(app(slow.scope, slow.receive, slow.send))
        await slow.first.wait()
        async with client_of(app) as client:
            assert (await complete(client, prompt="other", max_tokens=80)).status_code == 200
        assert len(slow.sent) == 1
        slow.reads.set()
        await serving
        assert slow.text() == bytes(started.runner.alone(IDS, 60)).decode()
        assert len(slow.sent) < 10, "what was not read in time comes in one piece"


async def test_an_engine_that_fails_mid_stream_ends_it_with_an_error_event(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        client = Client({"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True})
        serving = asyncio.create_task(RankApp(started.engine)(client.scope, client.receive, client.send))
        await client.first.wait()
        started.runner.failure = ArithmeticError("no numbers")
        await serving
        last = client.sent[-1]
        assert last["more_body"] is False
        assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "engine_failed"


async def test_a_real_server_streams_and_notices_a_closed_connection(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        server = uvicorn.Server(
            uvicorn.Config(RankApp(started.engine), port=0, log_config=None, lifespan="on")
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 (uvicorn offers no event for it)
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                assert (
                    "".join(
                        one.choices[0].text
                        for one in events_of(await complete(client, max_tokens=9, stream=True))
                        if one.choices
                    )
                    == bytes(started.runner.alone(IDS, 9)).decode()
                )
                async with client.stream(
                    "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 450, "stream": True}
                ) as response:
                    await anext(response.aiter_bytes())
            async with asyncio.timeout(2):
                while (load := started.engine.take_facts().load).running or load.decode_blocks:
                    await started.engine.wait_facts()
        finally:
            server.should_exit = True
            await serving
