"""Model card of a worker: what routers and frontends learn of it from discovery.

A frontend renders chat templates and tokenizes with the files of a folder that the card names. The folder
holds no weights; frontends on other machines need it at the same path.
"""

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.dynamo.requests import DisaggregationMode
from engine_adapter.engine import EngineDescription

ENGINE_DATA = "roost"
"""Key of Roost's own data in a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard:
    """Card of a worker, which serves some ranks of an engine."""

    model: str
    folder: Path
    """Folder with the model's tokenizer.json, tokenizer_config.json and config.json."""
    block_size: int
    kv_blocks: int
    """Of each rank."""
    max_running: int
    """Sequences that each rank runs concurrently."""
    max_context: int
    max_batch_tokens: int
    first_rank: int
    ranks: int
    """Number of ranks from the first one on that this worker serves."""
    engine: str
    """Name of the engine."""
    worker_id: int
    """Incarnation of the engine, as in `EngineJoined`."""
    mode: DisaggregationMode = "agg"

    @property
    def engine_data(self) -> str:
        """Roost's own data as JSON. The worker_id is text, because it exceeds what a double holds."""
        return json.dumps({"engine": self.engine, "worker_id": f"{self.worker_id:016x}"})


def card_of(
    about: EngineDescription,
    folder: Path,
    *,
    ranks: int,
    max_running: int,
    engine: str,
    worker_id: int,
    mode: DisaggregationMode = "agg",
) -> WorkerCard:
    """Return the card of a worker with `ranks` ranks, of which `about` describes the first."""
    return WorkerCard(
        model=about.model,
        folder=folder,
        block_size=about.block_size,
        kv_blocks=about.kv_blocks,
        max_running=max_running,
        max_context=about.max_context,
        max_batch_tokens=about.max_batch_tokens,
        first_rank=about.rank,
        ranks=ranks,
        engine=engine,
        worker_id=worker_id,
        mode=mode,
    )


def model_folder(parent: Path, archive: bytes, *, end_token: int, vocabulary: int, max_context: int) -> Path:
    """Return the folder below `parent` of a model that has no checkpoint, as of `write_model_folder`. All
    workers that share `parent` name the same folder: Dynamo's frontends take the cards of two workers for
    different models if their paths differ, and serve by the first one only.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="new-", dir=parent))
    try:
        write_model_folder(
            draft, archive, end_token=end_token, vocabulary=vocabulary, max_context=max_context
        )
        content = b"".join(file.name.encode() + file.read_bytes() for file in sorted(draft.iterdir()))
        folder = parent / hashlib.sha256(content).hexdigest()[:16]
        with contextlib.suppress(OSError):  # another worker has written it
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_model_folder(
    folder: Path, archive: bytes, *, end_token: int, vocabulary: int, max_context: int
) -> None:
    """Write the folder of a model that has no checkpoint: its tokenizer, and a config.json that names its end
    token. archive: `EngineDescription.tokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name in files.namelist():
            (folder / name).write_bytes(files.read(name))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "max_position_embeddings": max_context,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generation = {"bos_token_id": end_token, "eos_token_id": end_token}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
