"""Record what a worker on Dynamo's own runtime writes and sends, for the tests that replay it.

python -m tests.router.dynamo.record: needs the extra `dynamo`; replaces recorded.json.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

FILE = Path(__file__).with_name("recorded.json")
MODEL_FOLDER = "/models/tiny"
"""stands for the folder of the model in the recorded card"""


def make_model(folder: Path) -> None:
    """Write the files that Dynamo needs to offer a model; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: at for at, one in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{%- for m in messages -%}{{ m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor -%}"
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257}
    for name, content in {
        "tokenizer_config.json": {
            "eos_token": "<eos>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": template,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 8192,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **shape,
        },
        "generation_config.json": {"eos_token_id": 0},
    }.items():
        (folder / name).write_text(json.dumps(content))


async def record(folder: Path) -> dict[str, Any]:
    """Run a worker of two ranks, and return its records, its messages (hexadecimal frames) and the dump of
    Dynamo's index of them."""
    from dynamo._core import (
        DistributedRuntime,
        KvEventPublisher,
        KvRouter,
        KvRouterConfig,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerMetricsPublisher,
        WorkerType,
        register_model,
    )

    runtime: Any = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    limits: Any = ModelRuntimeConfig()
    limits.total_kv_blocks, limits.max_num_seqs, limits.max_num_batched_tokens = 1000, 64, 2048
    limits.context_length, limits.data_parallel_size = 4096, 2
    limits.enable_local_indexer = limits.kv_event_publishing_enabled = True
    make_model(folder / "model")

    async def handler(request: Any, context: Any) -> Any:
        yield {"token_ids": [], "finish_reason": "stop"}

    served = asyncio.ensure_future(endpoint.serve_endpoint(handler, graceful_shutdown=False))
    events = [
        KvEventPublisher(endpoint, kv_block_size=16, dp_rank=rank, enable_local_indexer=True)
        for rank in (0, 1)
    ]
    metrics = WorkerMetricsPublisher()
    await metrics.create_endpoint(endpoint)
    await register_model(
        ModelInput.Tokens, ModelType.Empty, endpoint, str(folder / "model"), "tiny",
        worker_type=WorkerType.Aggregated, kv_cache_block_size=16, runtime_config=limits,
    )  # fmt: skip
    await asyncio.sleep(1)
    records = [
        json.loads(path.read_bytes()) for path in sorted((folder / "kv/v1").rglob("*")) if path.is_file()
    ]
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    for one in records:
        if one["type"] == "EventChannel":
            socket.connect(one["transport"]["config"]["endpoint"])
    await asyncio.sleep(0.5)
    messages = []
    for rank, publisher in enumerate(events):
        publisher.publish_stored(list(range(48)), [16, 16, 16], [71, 72, 73])
        publisher.publish_stored(list(range(100, 116)), [16], [74], parent_hash=73)
        publisher.publish_removed([74])
        metrics.publish(rank, active_decode_blocks=3 + rank, kv_used_blocks=5)
        for _ in range(4):
            frames = await asyncio.wait_for(socket.recv_multipart(), 5)
            messages.append([frame.hex() for frame in frames])
    router = KvRouter(endpoint, 16, KvRouterConfig())
    await asyncio.sleep(1)
    dump = json.loads(await router.dump_events())
    served.cancel()
    runtime.shutdown()
    found = {"runtime": "ai-dynamo-runtime 1.6.1", "records": records, "messages": messages, "dump": dump}
    return json.loads(json.dumps(found).replace(str(folder / "model"), MODEL_FOLDER))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {
            "DYN_FILE_KV": f"{scratch}/kv",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_SELF_HOST_METADATA": "0",
            "HF_HUB_OFFLINE": "1",
        }
        Path(scratch, "kv").mkdir()
        FILE.write_text(json.dumps(asyncio.run(record(Path(scratch))), indent=1) + "\n")
