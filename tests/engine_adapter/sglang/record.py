"""Record KV event batches that SGLang's own message classes encode, for the test that reads them.

pip download --no-deps sglang==0.5.23; unzip the wheel, then
python -m tests.engine_adapter.sglang.record sglang/srt/disaggregation/kv_events.py

Only the classes of the messages are taken from that file: the rest of it needs a GPU.
"""

import ast
import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Optional, Union

import msgspec
import numpy as np

RECORDED = Path(__file__).parent / "kv-events-0.5.23.json"
_CLASSES = {"EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch"}
_BATCHES, _PAGE = 40, 16


def classes_of(source: str) -> dict[str, Any]:
    """Return SGLang's message classes by name."""
    names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "Optional": Optional, "Union": Union}
    names["__name__"] = "sglang_kv_events"
    wanted = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name in _CLASSES]
    exec(compile(ast.Module(list(wanted), []), "kv_events.py", "exec"), names)
    return names


def batches(names: dict[str, Any]) -> list[Any]:
    """Return batches of every kind of event, with and without the optional fields."""
    dice, made = np.random.default_rng(5), []

    def hashes(count: int) -> list[int]:
        return [int(one) for one in dice.integers(-(2**63), 2**63 - 1, count)]

    for number in range(_BATCHES):
        events = []
        for _ in range(int(dice.integers(1, 4))):
            count = int(dice.integers(1, 4))
            match int(dice.integers(5)):
                case 0:
                    events.append(names["AllBlocksCleared"]())
                case 1:
                    events.append(names["BlockRemoved"](hashes(count), [None, "GPU"][number % 2]))
                case _:
                    parent = hashes(1)[0] if dice.random() < 0.5 else None
                    tokens = dice.integers(0, 2**17, _PAGE * count).tolist()
                    medium, salt = [None, "GPU", "CPU_PINNED"][number % 3], [None, "tenant"][number % 2]
                    events.append(
                        names["BlockStored"](
                            hashes(count), parent, tokens, _PAGE, None, medium, salt, [None, "s"][number % 2]
                        )
                    )
        made.append(names["KVEventBatch"](float(number), events, [None, 3][number % 2]))
    return made


def main(path: str) -> None:
    """Write the recording."""
    source = Path(path).read_text(encoding="utf-8")
    told = [
        {
            "frame": base64.b64encode(msgspec.msgpack.encode(one)).decode(),
            "events": [
                {"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in one.events
            ],
        }
        for one in batches(classes_of(source))
    ]
    of = {
        "release": "0.5.23",
        "file": "sglang/srt/disaggregation/kv_events.py",
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
    }
    RECORDED.write_text(json.dumps({"of": of, "batches": told}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
