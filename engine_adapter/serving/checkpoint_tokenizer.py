"""Tokenizer of a checkpoint folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine_adapter.batching.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_letters
from engine_adapter.batching.tokenizer_archive import archived

_ARCHIVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class CheckpointTokenizer:
    """Tokenizer of a checkpoint folder. OSError or ValueError when a file is missing or unusable. The text
    names the file."""

    def __init__(self, folder: Path) -> None:
        definition = _read_json(folder / "tokenizer.json")
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "config.json")
        self.vocabulary: int = config.get("vocab_size") or self._tokenizer.get_vocab_size(
            with_added_tokens=True
        )
        """Upper bound (exclusive) of token IDs. This is the number of the model's rows, which may exceed the
        tokenizer's entries."""
        self.eos = _eos(folder, config)
        self._special = {
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self._bytes = (
            _token_bytes(self._tokenizer, self.vocabulary)
            if _is_byte_level(definition.get("decoder"))
            else None
        )
        self.archive = archived(
            {name: (folder / name).read_bytes() for name in _ARCHIVED if (folder / name).exists()}
        )
        """Zip archive of tokenizer.json, tokenizer_config.json, and the chat template if it is a separate
        file."""

    def encode(self, text: str) -> list[int]:
        """Encode a text, with the special tokens that the tokenizer adds around a prompt."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token IDs, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """Create an incremental detokenizer: exact for byte-level tokenizers, with a sliding window for
        others."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, self._special)
        return WindowDetokenizer(self._tokenizer)

    def piece(self, token: int) -> str:
        r"""Return a token's name in log-probabilities: its text, or `bytes:\xe2...` if its bytes alone are
        not valid UTF-8 (OpenAI's form)."""
        if self._bytes is None or token in self._special:
            spelt: str | None = self._tokenizer.id_to_token(token)
            return (spelt or "").replace("\u2581", " ")
        raw = self._bytes[token] if token < len(self._bytes) else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON object ({error}); fetch the checkpoint again") from error


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # The library raises nothing more specific.
        raise ValueError(f"{path}: not a tokenizer ({error}); fetch the checkpoint again") from error


def _eos(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Token IDs that end an answer: those of generation_config.json, else those of config.json."""
    generation = folder / "generation_config.json"
    chosen = _read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = config.get("eos_token_id") if chosen is None else chosen
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _token_bytes(tokenizer: Tokenizer, vocabulary: int) -> list[bytes]:
    """Bytes of every token ID, as the ByteLevel decoder defines them. Letters of its alphabet stand for
    bytes. A token with other letters is its own UTF-8."""
    letters = byte_letters()
    spelt = (
        tokenizer.id_to_token(token) or ""
        for token in range(max(vocabulary, tokenizer.get_vocab_size(with_added_tokens=True)))
    )
    return [
        (
            bytes(letters[letter] for letter in token)
            if all(letter in letters for letter in token)
            else token.encode()
        )
        for token in spelt
    ]
