"""What a worker on Dynamo's own runtime wrote and sent (`record`), as the tests use it."""

import json
import random
from pathlib import Path
from typing import Any

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded.json").read_bytes())
RECORDS: list[bytes] = [json.dumps(one).encode() for one in RECORDED["records"]]
MESSAGES: list[list[bytes]] = [[bytes.fromhex(frame) for frame in frames] for frames in RECORDED["messages"]]
"""frames from ZeroMQ, in order"""
DUMP: bytes = json.dumps(RECORDED["dump"]).encode()
WORKER: int = next(one["instance_id"] for one in RECORDED["records"] if one["type"] == "Model")


def stored(renewed: float = 1.0) -> dict[str, tuple[float, bytes]]:
    """Discovery's content while that worker is alive."""
    return {str(at): (renewed, record) for at, record in enumerate(RECORDS)}


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some of them changed, inserted, removed, or cut off."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) or 1)
        match chance.randrange(4):
            case 0 if found:
                found[at % len(found)] = chance.randrange(256)
            case 1:
                found[at:at] = chance.randbytes(chance.randint(1, 9))
            case 2:
                del found[at : at + chance.randint(1, 9)]
            case _:
                del found[at:]
    return bytes(found)
