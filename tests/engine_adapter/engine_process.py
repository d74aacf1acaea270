"""One rank of a real engine in a process of its own, driven over stdin and stdout, a JSON object a line.

`python engine_process.py JOB.json RANK`: says {"ready": ...}, then per line {"ask": {prompt, max_tokens, ...}} answers with the ids,
{"cpu": seconds} with the share of a core used meanwhile; at the end of input it stops and says {"stopped": true}. When the engine
fails it says {"failed": reason}.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.answers import GenerationRequest
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import EngineFailed


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def answer(engine: EmbeddedEngine, order: dict[str, Any]) -> None:
    if "cpu" in order:
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(order["cpu"])
        say(cpu=(time.process_time() - used) / (time.monotonic() - began))
        return
    ids: list[int] = []
    async for delta in await engine.submit(GenerationRequest(ignore_eos=True, **order["ask"])):
        if not ids:
            say(begun=True)
        ids += delta.token_ids
    say(ids=ids)


async def main(job: dict[str, Any], rank: int) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(checkpoint=Path(job["checkpoint"]), **job["settings"]), rank, Path(job["run_directory"]))
    await engine.start()
    running = asyncio.create_task(engine.run(), name=f"rank {rank}")
    say(ready=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    try:
        while line := await orders.readline():
            await answer(engine, json.loads(line))
        running.cancel()
        await asyncio.wait([running])
        say(stopped=True)
    except EngineFailed as error:
        say(failed=str(error))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
