"""Mock engines as fleet members: joined over NATS with a tokenizer, with heartbeats and KV events."""

import asyncio
import contextlib
import io
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bus.claims import NameClaim
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.blocks import BLOCK_SIZE, local_hashes, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined

MODEL = "mock"
_ARCHIVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@contextlib.asynccontextmanager
async def mock_fleet(
    nats_url: str, ports: Sequence[int], tokenizer: Path, *, token_frames: bool = False
) -> AsyncIterator[NatsBus]:
    """Announce each mock as an engine of one rank that takes token ids of the tokenizer in a folder, and send
    its heartbeats."""
    subjects = Subjects()
    bus = await NatsBus.connect(nats_url, subjects)
    digest = await bus.put_blob(_archive(tokenizer))
    joined = [_joined(f"mock{at}", port, digest, token_frames) for at, port in enumerate(ports)]
    for event in joined:
        await NameClaim(
            bus, subjects.claim(event.engine), event.engine, worker_id=event.worker_id, node=event.node
        ).take()
        await bus.record(subjects.membership(event.engine), event)
    beating = asyncio.create_task(_beat(bus, subjects, joined), name="heartbeats of the mock engines")
    try:
        yield bus
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await bus.close()


async def tell_held(bus: NatsBus, worker_id: int, prompts: Sequence[Sequence[int]]) -> None:
    """Publish once that an engine holds the full blocks of these prompts (token ids)."""
    publisher = bus.publisher(Subjects().kv_events)
    for number, ids in enumerate(prompts):
        local = local_hashes(ids)
        blocks = tuple(
            KvBlock(block_hash=chained, tokens_hash=one)
            for one, chained in zip(local, sequence_hashes(local), strict=True)
        )
        event = KvEvent(event_id=number, data=KvChange(stored=KvStored(blocks=blocks)))
        await publisher.publish((RoutedKvEvent(worker_id=worker_id, event=event),))


def _archive(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        for name in _ARCHIVED:
            if (folder / name).exists():
                files.write(folder / name, name)
    return packed.getvalue()


def _joined(name: str, port: int, digest: str, token_frames: bool) -> EngineJoined:
    return EngineJoined(
        engine=name,
        worker_id=port,
        model=MODEL,
        node="bench",
        urls=(f"http://127.0.0.1:{port}",),
        block_size=BLOCK_SIZE,
        kv_blocks=65536,
        max_context=65536,
        max_batch_tokens=8192,
        tokenizer=digest,
        capabilities=Capabilities(load=False, experts=False, token_frames=token_frames),
    )


async def _beat(bus: NatsBus, subjects: Subjects, engines: list[EngineJoined]) -> None:
    publishers = [bus.publisher(subjects.heartbeats(engine.engine)) for engine in engines]
    while True:
        for engine, publisher in zip(engines, publishers, strict=True):
            await publisher.publish(
                EngineHeartbeat(engine=engine.engine, worker_id=engine.worker_id, epoch=0)
            )
        await asyncio.sleep(1)
