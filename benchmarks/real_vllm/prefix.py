"""Prefix hits of two real vLLMs behind Roost, by vLLM's own counters: conversations of several turns on the
chat route, four requests at once, caches larger than all of them.

The ideal is a cache per conversation that never forgets: of each prompt, the full blocks that are a prefix of
an earlier prompt and answer of the same conversation, at most all tokens but the last. The last token of an
answer was never computed. First turns count nothing, whatever they share. What is reached is vLLM's counter
`prefix_cache_hits` over both servers, over that ideal. Once streamed, once not; each on fresh conversations.

Two starts of vLLM take some minutes, with --quick too, which has fewer conversations.

    python -m benchmarks.real_vllm.prefix --quick --python .venv-vllm/bin/python
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import typer

from benchmarks.demo_model import heldout_path
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.vllm.fronted import Behind, fronted, kv_events
from benchmarks.rig.vllm.server import BLOCK, MODEL, PYTHON, Server, serving, with_vllm

REACHED = 0.98
TURNS, CONCURRENCY, SERVERS = 5, 4, 2
ANSWER, PATIENCE_SECONDS = 24, 120.0
_SETTINGS: dict[str, dict[str, Any]] = {"planner": {"automatic": False}}
_HITS = re.compile(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", re.MULTILINE)
_COLUMNS = ["answers", "requests", "prompt tokens", "ideal hits", "hits", "share of the ideal"]
Python = typer.Option(None, help=f"Python of vLLM's environment; default: ${PYTHON}, .venv-vllm")


class Answer(NamedTuple):
    """One answer of vLLM: token ids of prompt and answer, and its text."""

    prompt: list[int]
    ids: list[int]
    text: str


@dataclass
class Conversation:
    """Turns so far."""

    said: list[str]
    """what the user says, turn by turn"""
    messages: list[dict[str, str]] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    """token sequences that a server has computed for it"""

    def ask(self, turn: int) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": self.said[turn]}]

    def heard(self, turn: int, answer: Answer) -> int:
        """Continue the conversation; return how many tokens of the prompt an unlimited cache would have
        had."""
        ideal = max((shared(answer.prompt, one) for one in self.computed), default=0)
        self.messages = [*self.ask(turn), {"role": "assistant", "content": answer.text}]
        self.computed.append(answer.prompt + answer.ids[:-1])
        return ideal


def shared(prompt: Sequence[int], computed: Sequence[int]) -> int:
    """Return the tokens in full blocks that the prompt can take over: at most all but its last token."""
    same = next(
        (at for at, (one, other) in enumerate(zip(prompt, computed, strict=False)) if one != other),
        min(len(prompt), len(computed)),
    )
    return min(same, len(prompt) - 1) // BLOCK * BLOCK


def conversations(count: int, seed: int) -> list[Conversation]:
    """Return conversations whose users say pieces of held-out documents, all different."""
    dice = np.random.default_rng(seed)
    files = sorted(file for file in (heldout_path() / "en").iterdir() if file.is_file())
    documents = [file.read_text("utf-8", errors="replace") for file in files]

    def piece() -> str:
        document, length = documents[int(dice.integers(len(documents)))], int(dice.integers(50, 110))
        begin = int(dice.integers(len(document) - length))
        return document[begin : begin + length]

    return [Conversation([piece() for _ in range(TURNS)]) for _ in range(count)]


async def talk(router: str, several: list[Conversation], *, stream: bool) -> tuple[int, int]:
    """Carry on all conversations, `CONCURRENCY` at once: each client takes turns with its own ones, so that a
    conversation's turns lie apart. Returns the prompt tokens and the ideal's hits."""
    tokens, ideal = 0, 0

    async def client(http: aiohttp.ClientSession, own: list[Conversation]) -> None:
        nonlocal tokens, ideal
        for turn in range(TURNS):
            for one in own:
                answer = await _ask(http, one.ask(turn), stream=stream)
                tokens += len(answer.prompt)
                ideal += one.heard(turn, answer)

    timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    async with aiohttp.ClientSession(router, timeout=timeout) as http, asyncio.TaskGroup() as tasks:
        for number in range(CONCURRENCY):
            tasks.create_task(client(http, several[number::CONCURRENCY]))
    return tokens, ideal


async def _ask(http: aiohttp.ClientSession, messages: list[dict[str, str]], *, stream: bool) -> Answer:
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    async with http.post("/v1/chat/completions", json=body) as answer:
        text = await answer.text()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} from the router: {text[:500]}")
    return streamed(text) if stream else whole(json.loads(text))


def whole(body: dict[str, Any]) -> Answer:
    """Read an unstreamed answer."""
    choice = body["choices"][0]
    return Answer(body["prompt_token_ids"], choice["token_ids"], choice["message"]["content"])


def streamed(text: str) -> Answer:
    """Read the events of a stream."""
    prompt, ids, said = [], [], ""
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        prompt = event.get("prompt_token_ids") or prompt
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            said += choice["delta"].get("content") or ""
    return Answer(prompt, ids, said)


async def hits(servers: Sequence[str]) -> float:
    """Return the tokens that vLLM says it found in its prefix caches, since their starts."""
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for server in servers:
            async with http.get(f"{server}/metrics") as answer:
                total += sum(float(value) for value in _HITS.findall(await answer.text()))
    return total


async def measure(python: Path, count: int, report: Report) -> None:
    """Start two vLLMs and Roost; talk streamed, then unstreamed."""
    with tempfile.TemporaryDirectory(prefix="roost-vllm-prefix-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            servers = []
            for number in range(SERVERS):
                server = Server(python, (), None, kv_events(1))
                vllm = await stack.enter_async_context(serving(server, folder / f"server-{number}.log"))
                servers.append(vllm.url)
            behind = [
                Behind(f"vllm-{at}", url, {"plugin_seconds": 0.0, "listen": f"127.0.0.1:{7300 + at}"})
                for at, url in enumerate(servers)
            ]
            fleet = await stack.enter_async_context(fronted(behind, _SETTINGS, folder))
            for seed, stream in enumerate((True, False)):
                before = await hits(servers)
                tokens, ideal = await talk(fleet.router, conversations(count, seed), stream=stream)
                await asyncio.sleep(1.0)  # vLLM counts with its next output
                reached = await hits(servers) - before
                kind = "streamed" if stream else "not streamed"
                report.add(kind, count * TURNS, tokens, ideal, round(reached), reached / ideal)
                report.targets.append(Target(f"prefix hits, {kind}", reached / ideal, REACHED))


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    python: Path = Python,
    count: int = typer.Option(None, min=CONCURRENCY, help="conversations of five turns, twice"),
) -> None:
    """Measure the prefix hits of two vLLMs behind Roost."""
    report = Report("Prefix hits of two vLLMs behind Roost, by vLLM's counters", _COLUMNS)
    many = count or (8 if quick else 40)
    with_vllm(
        report,
        python,
        lambda interpreter: asyncio.run(measure(interpreter, many, report)),
        as_json=as_json,
        check=check,
    )


if __name__ == "__main__":
    typer.run(main)
