"""Tokenizer folders: the demo model's bytes, a trained BPE with merges, and one that is not byte-level."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "the engine routes each request to the place where its prefix lives",
    "größer als die Ähre: über Straßen, naïve café déjà vu",
    "日本語のテキストとemoji 😀😀 and more 🚀 text",
    "def function(argument): return argument + 1",
    "Привет, как дела? Всё хорошо.",
] * 20


def byte_letters() -> list[str]:
    """Letter of each byte in the byte-level alphabet, taken from the library rather than from the code under test."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = iter(byte for byte in range(256) if chr(byte) not in plain)
    letters = plain | {letter: next(others) for letter in alphabet if letter not in plain}
    return sorted(letters, key=lambda letter: letters[letter])


def write_folder(folder: Path, tokenizer: Tokenizer, eos: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size() + 3, "eos_token_id": eos}))
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
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return write_folder(tmp_path_factory.mktemp("merges"), tokenizer, 0)


@pytest.fixture(scope="session")
def fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece-like tokenizer: words with a leading mark, unknown characters as byte tokens."""
    words = ["\u2581", "\u2581the", "\u2581engine", "s", "t", "e", "\u2581a", "."]
    vocabulary = {"</s>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)} | {word: 257 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["</s>"])
    return write_folder(tmp_path_factory.mktemp("fallback"), tokenizer, 0)
