"""Record what a vLLM with KV events answers and publishes while known prompts run on each of its ranks.

    python -m tests.engine_adapter.vllm.record http://127.0.0.1:8000 tests/engine_adapter/vllm/vllm-0.32.0.json

The server: two data-parallel ranks of a small dense model, `--block-size 32 --num-gpu-blocks-override 24
--enable-prompt-tokens-details --kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5657",
"replay_endpoint": "tcp://*:5757"}'`, VLLM_SERVER_DEV_MODE=1 (to clear the caches).
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio

QUIET_SECONDS = 0.7
RANK_HEADER = "X-data-parallel-rank"


def text(seed: int, tokens: int) -> list[int]:
    """A prompt of token ids that shares no block with those of other seeds."""
    return [(seed * 37 + at * (seed % 7 + 1)) % 200 + 20 for at in range(tokens)]


class Recorder:
    """Requests in order, with the number of frames that each rank had published when the rank was quiet."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self.frames: dict[int, list[str]] = {}
        self.steps: list[dict[str, Any]] = []
        self._client, self._model = client, model

    async def listen(self, rank: int, endpoint: str) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.connect(endpoint.replace("*", "127.0.0.1"))
        socket.subscribe("")
        frames = self.frames.setdefault(rank, [])
        while True:
            _, number, payload = await socket.recv_multipart()
            if int.from_bytes(number, "big") != len(frames):
                raise RuntimeError(f"rank {rank}: event {len(frames)} is missing; start the server anew")
            frames.append(base64.b64encode(payload).decode())

    async def ask(
        self, rank: int, prompt: list[int], salt: str | None = None, tokens: int = 8
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({} if salt is None else {"cache_salt": salt}),
        }
        answer = await self._client.post("/v1/completions", json=body, headers={RANK_HEADER: str(rank)})
        answer.raise_for_status()
        found = answer.json()
        details = found["usage"]["prompt_tokens_details"] or {}
        return {
            "rank": rank,
            "salt": salt or "",
            "prompt": prompt,
            "answer": found["choices"][0]["token_ids"],
            "cached": details.get("cached_tokens") or 0,
        }

    async def step(self, what: str, *asked: Any) -> list[dict[str, Any]]:
        """Run requests at the same time, wait until the ranks are quiet, and keep what was seen."""
        done = list(await asyncio.gather(*asked))
        await asyncio.sleep(QUIET_SECONDS)
        self.steps.append(
            {"what": what, "requests": done, "frames": {str(r): len(f) for r, f in self.frames.items()}}
        )
        print(what, [one["cached"] for one in done], self.steps[-1]["frames"])  # noqa: T201 a command of its own
        return done

    async def on_rank(self, rank: int) -> None:
        seed = 10 * rank
        first = (await self.step("new", self.ask(rank, text(seed + 1, 100), tokens=40)))[0]
        turn = first["prompt"] + first["answer"] + text(seed + 2, 30)
        await self.step("next turn", self.ask(rank, turn))
        await self.step("same prompt with a salt", self.ask(rank, first["prompt"], "tenant-a"))
        await self.step("same prompt with that salt", self.ask(rank, first["prompt"], "tenant-a"))
        twin = text(seed + 3, 70)
        await self.step("two equal prompts at once", self.ask(rank, twin), self.ask(rank, twin))
        for number in range(4):
            await self.step("fill", self.ask(rank, text(seed + 4 + number, 150)))
        await self.step("first turn again", self.ask(rank, turn))
        await self.step("twin again", self.ask(rank, twin))


def used(metrics: str) -> str:
    """The samples that the agent reads."""
    kept = [line for line in metrics.splitlines() if line.startswith(("vllm:", "process_start"))]
    return "".join(f"{line}\n" for line in kept if "_bucket{" not in line)


async def main(base: str) -> str:
    """Ask everything once; the recording as JSON."""
    async with httpx.AsyncClient(base_url=base, timeout=120) as client:
        models = (await client.get("/v1/models")).json()
        sources = (await client.get("/kv_event_sources")).json()
        version = (await client.get("/version")).json()
        recorder = Recorder(client, models["data"][0]["id"])
        listeners = [
            asyncio.create_task(recorder.listen(int(rank), source["endpoint"]))
            for rank, source in sources.items()
        ]
        await asyncio.sleep(1)
        idle = (await client.get("/metrics")).text
        for rank in range(len(sources)):
            await recorder.on_rank(rank)
        busy = [asyncio.create_task(recorder.ask(1, text(50 + n, 100), tokens=300)) for n in range(6)]
        await asyncio.sleep(1.0)
        loaded = (await client.get("/metrics")).text
        await recorder.step("under load", *busy)
        await client.post("/reset_prefix_cache")
        await recorder.step("cleared", recorder.ask(0, text(99, 64)), recorder.ask(1, text(99, 64)))
        for listener in listeners:
            listener.cancel()
    for card in models["data"]:
        card["root"] = "/models/small"
        del card["permission"]
    kept = {
        "version": version,
        "models": models,
        "sources": sources,
        "metrics": used(idle),
        "loaded": used(loaded),
        "steps": recorder.steps,
        "frames": {str(rank): frames for rank, frames in recorder.frames.items()},
    }
    return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(asyncio.run(main(sys.argv[1])), encoding="utf-8")
