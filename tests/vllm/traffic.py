"""Greedy streams of token ids, and what they must be."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import numpy as np

from tests.vllm.server import SERVED

TOKENS = 40
Prompt = tuple[int, ...]


class Served(Protocol):
    """A vLLM, or the router before it."""

    @property
    def url(self) -> str: ...

    @property
    def targets(self) -> int: ...


class Explained(RuntimeError):
    """The server says why there is no answer, or no more of it: an error with a message."""


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of 20 to 90 tokens of printable bytes."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(32, 127, rng.integers(20, 90)).tolist()) for _ in range(count)]


async def stream(client: httpx.AsyncClient, server: Served, prompt: Prompt, target: int = 0) -> list[int]:
    """Return the ids of a greedy stream. httpx.HTTPError, or RuntimeError for an error amid it."""
    return [one async for one in streamed(client, server, prompt, target)]


async def streamed(
    client: httpx.AsyncClient, server: Served, prompt: Prompt, target: int
) -> AsyncIterator[int]:
    """Yield the ids of a greedy stream as they come."""
    body = {**_body(prompt, TOKENS), "stream": True}
    headers = {"X-data-parallel-rank": str(target)} if server.targets > 1 else {}
    async with client.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        await _check_status(answer)
        is_whole = False
        async for line in answer.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise _failure("an error amid the stream", event)
                for choice in event["choices"]:
                    for one in choice.get("token_ids") or ():
                        yield one
        if not is_whole:
            raise RuntimeError("the stream ended without [DONE]")


async def unstreamed(
    client: httpx.AsyncClient, server: Served, prompt: Prompt, tokens: int
) -> tuple[list[int], str]:
    """Return the ids of a greedy answer that is not streamed, and the id of the router's decision. Errors as
    `stream`."""
    answer = await client.post(f"{server.url}/v1/completions", json=_body(prompt, tokens))
    await _check_status(answer)
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], answer.headers["x-roost-decision-id"]


def _body(prompt: Prompt, tokens: int) -> dict[str, Any]:
    return {
        "model": SERVED,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }


async def _check_status(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        body = await answer.aread()
        raise _failure(f"HTTP {answer.status_code}", json.loads(body) if body.startswith(b"{") else body)


def _failure(what: str, said: Any) -> RuntimeError:
    """Return Explained if `said` is an error with a message, as OpenAI writes it."""
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return Explained(f"{what}: {message}") if message else RuntimeError(f"{what} without a reason: {said!r}")


@dataclass
class Traffic:
    """Streams that go on, compared with those of the same prompts before."""

    expected: dict[Prompt, list[int]]
    finished: int = 0
    tokens: int = 0
    differ: list[Prompt] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    """those of the failed whose client was not told why"""
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def more(self, tokens: int, seconds: float = 300.0) -> None:
        """Wait for that many tokens more. TimeoutError when they do not come: vLLM hangs."""
        wanted = self.tokens + tokens
        async with asyncio.timeout(seconds):
            while self.tokens < wanted:
                self._grown.clear()
                await self._grown.wait()

    async def one_after_another(self, client: httpx.AsyncClient, server: Served, seed: int) -> None:
        """Stream prompts in random order for ever."""
        rng = np.random.default_rng(seed)
        known = list(self.expected)
        while True:
            prompt, ids = known[rng.integers(len(known))], []
            try:
                async for one in streamed(client, server, prompt, seed % server.targets):
                    ids.append(one)
                    self.tokens += 1
                    self._grown.set()
            except (httpx.HTTPError, RuntimeError) as error:
                self.failed.append(repr(error))
                if not isinstance(error, Explained):
                    self.unexplained.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            self.finished += 1
            if ids != self.expected[prompt]:
                self.differ.append(prompt)


async def unbroken(server: Served, asked: Sequence[Prompt]) -> dict[Prompt, list[int]]:
    """Return the ids of prompts streamed one after another while nothing else happens."""
    async with httpx.AsyncClient(timeout=120) as client:
        return {prompt: await stream(client, server, prompt) for prompt in asked}


@contextlib.asynccontextmanager
async def streaming(
    server: Served, expected: dict[Prompt, list[int]], streams: int = 4
) -> AsyncIterator[Traffic]:
    """Keep that many streams going with the context."""
    traffic = Traffic(expected)
    async with httpx.AsyncClient(timeout=120) as client:
        tasks = [
            asyncio.create_task(traffic.one_after_another(client, server, seed)) for seed in range(streams)
        ]
        try:
            yield traffic
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
