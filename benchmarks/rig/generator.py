"""One side of the engine benchmark as a separate process: reads batches of prompts from standard input,
generates greedily, reports the time.

    python -m benchmarks.rig.generator transformers THREADS
    python -m benchmarks.rig.generator roost RANK RANKS RUN_DIRECTORY

A line in: `{"prompts": [[ids]], "tokens": n}`. A line out: `{"seconds": s, "outputs": [[ids]]}`. The first
line out is `{"ready": true}`.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from deploy.demo_model import checkpoint_path
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine

Prompts = list[list[int]]


class Batch(msgspec.Struct):
    prompts: Prompts
    tokens: int


class Result(msgspec.Struct):
    seconds: float
    outputs: list[list[int]]


def say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def transformers_side(threads: int) -> Callable[[Batch], list[list[int]]]:
    """Return HF `generate` with its defaults: fp32, sdpa, grouped experts. Prompts must have one length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()

    def generate(batch: Batch) -> list[list[int]]:
        ids = torch.tensor(batch.prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=batch.tokens,
                min_new_tokens=batch.tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [list(row) for row in out[:, ids.shape[1] :].tolist()]

    return generate


def serve_transformers(threads: int) -> None:
    generate = transformers_side(threads)
    say({"ready": True})
    for line in sys.stdin.buffer:
        batch = msgspec.json.decode(line, type=Batch)
        start = time.perf_counter()
        outputs = generate(batch)
        say(Result(time.perf_counter() - start, outputs))


async def _one(engine: EmbeddedEngine, prompt: list[int], tokens: int) -> list[int]:
    answer = await engine.submit(GenerationRequest(prompt=prompt, max_tokens=tokens, ignore_eos=True))
    return (await answer.rest()).token_ids  # `generate` returns complete answers too


async def serve_roost(rank: int, ranks: int, run_directory: Path) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(checkpoint=checkpoint_path(), ranks=ranks), rank, run_directory)
    await engine.start()
    running = asyncio.create_task(engine.run(), name="supervises the engine's steps")
    say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        batch = msgspec.json.decode(line, type=Batch)
        start = time.perf_counter()
        outputs = await asyncio.gather(*(_one(engine, prompt, batch.tokens) for prompt in batch.prompts))
        say(Result(time.perf_counter() - start, list(outputs)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    if sys.argv[1] == "transformers":
        serve_transformers(int(sys.argv[2]))
    else:
        asyncio.run(serve_roost(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
