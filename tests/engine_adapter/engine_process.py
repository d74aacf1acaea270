"""A process that is one rank of a real engine, and after that one of the next; driven over stdin and stdout,
a JSON object a line.

{"start": {rank, run_directory, settings}} loads a rank, meets the others and says {"ready": true}. Then
{"ask": {prompts, max_tokens}} says {"begun": true} at the first id and {"answers": [{ids, cached,
preemptions}, ...]} at the end of all, which ran together; {"ready_for": epoch} says that it waits to serve
what it serves under that epoch, and {"epoch": true} which one it serves then, or why it never will; {"work":
true} says what the forward passes since the start were asked to do; {"cpu": seconds} the share of a core used
meanwhile; {"stop": true} leaves the engine and says {"stopped": true}. An engine that cannot start or go on
says {"failed": reason}.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.model_runner import Forward, SequenceWork
from engine_adapter.embedded.setup import ForwardPass, RankSetup, build_setup
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerDelta
from fleet.placement import Placement

LINE_BYTES = 2**20


def reply(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


@dataclass
class Seen:
    """What a rank's forward passes were asked to do; written by the step thread, read when nothing runs."""

    steps: int = 0
    batch_tokens: int = 0
    """of any step"""
    max_sequences: int = 0
    """of any step"""
    unfinished: int = 0
    """chunks of prompts that were not the last of theirs"""


@dataclass
class Witness:
    """A forward pass that keeps count."""

    runner: ForwardPass
    seen: Seen = field(default_factory=Seen)

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        seen = self.seen
        seen.steps += 1
        seen.batch_tokens = max(seen.batch_tokens, sum(len(one.tokens) for one in work))
        seen.max_sequences = max(seen.max_sequences, len(work))
        seen.unfinished += sum(not one.needs_logits for one in work)
        return self.runner.forward(work, tokens_by_rank)


class RankUnderOrders:
    """One rank at a time, from its start to its stop."""

    def __init__(self) -> None:
        self._engine: EmbeddedEngine | None = None
        self._running: asyncio.Task[None] | None = None
        self._seen = Seen()
        self._adopting: asyncio.Task[None] | None = None

    async def obey(self, order: dict[str, Any]) -> None:
        ((name, details),) = order.items()
        await getattr(self, name)(details)

    async def start(self, job: dict[str, Any]) -> None:
        config = EmbeddedConfig(**job["settings"] | {"checkpoint": Path(job["settings"]["checkpoint"])})
        self._engine = EmbeddedEngine(config, job["rank"], Path(job["run_directory"]), build=self._build)
        await self._engine.start()
        self._running = asyncio.create_task(self._engine.run(), name=f"rank {job['rank']}")
        await asyncio.sleep(
            0
        )  # a task that is cancelled before its first turn never stops what it supervises
        reply(ready=True)

    def _build(self, config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
        machine = build_setup(config, rank, run_directory)
        witness = Witness(machine.runner)
        self._seen = witness.seen
        return replace(machine, runner=witness)

    async def ask(self, expected: dict[str, Any]) -> None:
        engine, begun = self._engine, False
        assert engine is not None

        async def one(prompt: list[int]) -> dict[str, Any]:
            nonlocal begun
            whole = AnswerDelta()
            async for delta in await engine.submit(
                GenerationRequest(prompt=prompt, max_tokens=expected["max_tokens"], ignore_eos=True)
            ):
                if not begun:
                    begun = True
                    reply(begun=True)
                whole.absorb(delta)
            assert whole.outcome is not None
            return {
                "ids": whole.token_ids,
                "cached": whole.outcome.cached_tokens,
                "preemptions": whole.outcome.preemptions,
            }

        reply(answers=await asyncio.gather(*(one(prompt) for prompt in expected["prompts"])))

    async def ready_for(self, epoch: int) -> None:
        assert self._engine is not None
        experts, served = self._engine.experts, self._engine.placement
        assert experts is not None
        expected = Placement(served.expert_of_slot, experts=served.experts, ranks=served.ranks, epoch=epoch)
        self._adopting = asyncio.create_task(
            experts.adopt(await experts.prepare(expected, experts.cells)), name=f"epoch {epoch}"
        )
        await asyncio.sleep(0)
        reply(waits=self._engine.placement.epoch)

    async def epoch(self, _: object) -> None:
        assert self._engine is not None
        assert self._adopting is not None
        await self._adopting
        reply(epoch=self._engine.placement.epoch)

    async def work(self, _: object) -> None:
        reply(work=asdict(self._seen))

    async def cpu(self, seconds: float) -> None:
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        reply(cpu=(time.process_time() - used) / (time.monotonic() - began))

    async def stop(self, _: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._engine = self._running = None
        reply(stopped=True)


async def main() -> None:
    orders = asyncio.StreamReader(LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    rank = RankUnderOrders()
    while line := await orders.readline():
        try:
            await rank.obey(json.loads(line))
        except EngineFailed as error:
            reply(failed=str(error))


if __name__ == "__main__":
    asyncio.run(main())
