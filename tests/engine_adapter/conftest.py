"""Tokenizer folders (the demo model's bytes, a trained BPE with merges, one that is not byte-level), and an
engine without weights."""

import asyncio
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.calibration.calibrate import EngineCalibration
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.model_runner import Forward, SequenceWork
from engine_adapter.embedded.setup import RankSetup
from engine_adapter.embedded.step_sync import StepSync
from fleet.experts import ModelShape
from fleet.placement import linear
from fleet.timing import EngineSpeed

SENTENCES = [
    "the engine routes each request to the place where its prefix lives",
    "größer als die Ähre: über Straßen, naïve café déjà vu",
    "日本語のテキストとemoji 😀😀 and more 🚀 text",
    "def function(argument): return argument + 1",
    "Привет, как дела? Всё хорошо.",
] * 20


def byte_letters() -> list[str]:
    """Letter of each byte in the byte-level alphabet, taken from the library rather than from the code under
    test."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = iter(byte for byte in range(256) if chr(byte) not in plain)
    letters = plain | {letter: next(others) for letter in alphabet if letter not in plain}
    return sorted(letters, key=lambda letter: letters[letter])


def write_folder(folder: Path, tokenizer: Tokenizer, eos: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.get_vocab_size() + 3, "eos_token_id": eos})
    )
    return folder


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 tokens, id == byte, byte 0 ends the answer; spelt as the demo model spells it."""
    letters = byte_letters()
    vocabulary = {"\x00" if byte == 0 else letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["\x00"])
    folder = write_folder(tmp_path_factory.mktemp("bytes"), tokenizer, 0)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 256, "eos_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def merging_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose merges cut through characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return write_folder(tmp_path_factory.mktemp("merges"), tokenizer, 0)


@pytest.fixture(scope="session")
def fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece-like tokenizer: words with a leading mark, unknown characters as byte tokens."""
    words = ["\u2581", "\u2581the", "\u2581engine", "s", "t", "e", "\u2581a", "."]
    vocabulary = (
        {"</s>": 0}
        | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
        | {word: 257 + index for index, word in enumerate(words)}
    )
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return write_folder(tmp_path_factory.mktemp("fallback"), tokenizer, 0)


@dataclass
class PretendRunner:
    """A forward pass without weights: logits are a hash of the tokens it finds in the pages, so wrong pages
    give wrong tokens."""

    vocabulary: int
    shape: ModelShape
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    steps: int = 0
    failure: Exception | None = None
    """raised by the next step with work"""
    hold: threading.Event | None = None
    """waited for in every step"""
    letters: bytes = b"abcdefgh"
    """likely outputs"""

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        if self.failure is not None:
            raise self.failure
        if self.hold is not None:
            self.hold.wait(30)
        self.steps += 1
        for one in work:
            for position, token in enumerate(one.tokens, start=one.start):
                self.memory[one.pages[position // 16], position % 16] = token
        rows = [self.logits(self._seen(one)) for one in work if one.needs_logits]
        routed = [self.routing(token) for one in work for token in one.tokens]
        experts = np.array(routed, np.uint8).reshape(-1, self.shape.layers, self.shape.top_k)
        return Forward(torch.tensor(np.array(rows, np.float32).reshape(-1, self.vocabulary)), experts)

    def _seen(self, one: SequenceWork) -> list[int]:
        return [
            self.memory[one.pages[position // 16], position % 16]
            for position in range(one.start + len(one.tokens))
        ]

    def logits(self, seen: Sequence[int]) -> list[float]:
        """One row: the hash of the tokens seen picks a letter; the others follow at a distance that leaves
        sampling a choice."""
        random = np.random.default_rng(xxhash.xxh3_64_intdigest(np.asarray(seen, np.uint32).tobytes()))
        row = random.normal(-6, 1, self.vocabulary)
        row[list(self.letters)] = random.normal(0, 1, len(self.letters))
        return row.tolist()

    def routing(self, token: int) -> list[list[int]]:
        """[layers, k] distinct experts that depend on the token."""
        return [
            [(token + layer + k) % self.shape.experts for k in range(self.shape.top_k)]
            for layer in range(self.shape.layers)
        ]

    def alone(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy continuation, without any engine."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(np.asarray(self.logits(tokens), np.float32))))
        return tokens[len(prompt) :]


@dataclass
class Started:
    """A running engine over a `PretendRunner`."""

    engine: EmbeddedEngine
    runner: PretendRunner
    run: "asyncio.Task[None]"


EngineStarter = Callable[..., AbstractAsyncContextManager[Started]]


@pytest.fixture
def pretend_engine(byte_folder: Path, tmp_path: Path) -> EngineStarter:
    """`async with pretend_engine(kv_blocks=8) as started:` an engine of one rank that serves until the block
    ends."""

    @asynccontextmanager
    async def start(
        context: int = 512, letters: bytes = b"abcdefgh", **settings: Any
    ) -> AsyncIterator[Started]:
        shape = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=4)
        runner = PretendRunner(256, shape, letters=letters)

        def build(config: EmbeddedConfig, rank: int, run_directory: Path | None) -> RankSetup:
            step_sync = StepSync(Path(tempfile.mkdtemp(dir=tmp_path)))
            return RankSetup(
                shape=shape,
                vocabulary=256,
                max_context=context,
                placement=linear(layers=2, experts=8, ranks=1),
                calibration=EngineCalibration(speed=EngineSpeed()),
                runner=runner,
                step_sync=step_sync,
                close=step_sync.close,
            )

        config = EmbeddedConfig(
            checkpoint=byte_folder,
            **{"kv_blocks": 64, "max_batch_tokens": 64, "max_running": 8, "seed": 1, "model": "pretend"}
            | settings,
        )
        engine = EmbeddedEngine(config, build=build)
        await engine.start()
        run = asyncio.create_task(engine.run(), name="the engine under test")
        await asyncio.sleep(
            0
        )  # a task that is cancelled before its first turn never stops what it supervises
        try:
            yield Started(engine, runner, run)
        finally:
            run.cancel()
            await asyncio.wait([run])

    return start
