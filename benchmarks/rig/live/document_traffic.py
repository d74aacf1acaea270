"""Requests from documents: prompts are windows of texts of several domains, drawn with a seed.

A user's folder holds one text file, or one folder of text files, per domain. The default is the demo model's
held-out documents. One byte is one token of the demo model; other models use the tokenizer in the checkpoint.

Windows begin at multiples of 16 tokens, a KV block, plus an offset per phase of a run: no phase finds prompts
of another in the prefix caches, and all use the same texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model import heldout_path
from deploy.sections import DEMO_CHECKPOINT
from fleet.blocks import BLOCK_SIZE

_NOT_TRAFFIC = ("licences",)
PIECE = 16
"""tokens in a piece of a mixed prompt"""
_STRAYS = 1
"""separates the seed of lengths from that of texts, so that drawing lengths does not change the texts"""


class Request(NamedTuple):
    domain: str
    prompt: list[int]
    stray: float
    """in [-1, 1): deviation of the answer's length from the mean, relative to the largest deviation"""


@dataclass(frozen=True)
class Texts:
    """Token ids of each document, by domain."""

    documents: dict[str, list[list[int]]]
    source: str

    @property
    def domains(self) -> list[str]:
        return sorted(self.documents)

    def some(self, domains: Sequence[str]) -> "Texts":
        """Return these domains only."""
        return Texts({name: self.documents[name] for name in domains}, self.source)

    def requests(self, prompt: int, seed: int, offset: int) -> Iterator[Request]:
        """Yield endless windows of `prompt` tokens of random documents of random domains: the same for the
        same seed, shifted by `offset` tokens (0..15)."""
        dice, strays = np.random.default_rng(seed), np.random.default_rng((seed, _STRAYS))
        while True:
            domain = self.domains[int(dice.integers(len(self.domains)))]
            yield Request(
                domain, self._window(domain, prompt, offset, dice), float(strays.uniform(-1.0, 1.0))
            )

    def shuffled(self, prompt: int, seed: int, offset: int) -> Iterator[Request]:
        """Yield endless prompts of homogeneous traffic, each of pieces of `PIECE` tokens of all domains in
        random order."""
        dice, strays, pieces = (
            np.random.default_rng(seed),
            np.random.default_rng((seed, _STRAYS)),
            -(-prompt // PIECE),
        )
        while True:
            order = dice.permutation(np.arange(pieces) % len(self.domains)).tolist()
            tokens = [token for at in order for token in self._window(self.domains[at], PIECE, offset, dice)]
            yield Request("shuffled", tokens[:prompt], float(strays.uniform(-1.0, 1.0)))

    def _window(self, domain: str, length: int, offset: int, dice: np.random.Generator) -> list[int]:
        documents = self.documents[domain]
        document = documents[int(dice.integers(len(documents)))]
        begin = BLOCK_SIZE * int(dice.integers(_windows(document, length))) + offset
        return document[begin : begin + length]


def _windows(document: list[int], prompt: int) -> int:
    return (len(document) - prompt - BLOCK_SIZE) // BLOCK_SIZE + 1


def texts(folder: Path | None, prompt: int, checkpoint: Path = DEMO_CHECKPOINT) -> Texts:
    """Read the texts of a folder, or (None) the held-out documents. Raises ValueError with the reason."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    root = folder or heldout_path()
    if not root.is_dir():
        raise ValueError(
            f"{root} is no folder; name one with a text file, or a folder of text files, per domain"
        )
    found: dict[str, list[list[int]]] = {}
    for place in sorted(root.iterdir()):
        if (
            place.name in _NOT_TRAFFIC
            or place.name.startswith(".")
            or (place.is_file() and place.suffix == ".json")
        ):
            continue
        files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
        tokens = [list(tokenizer.encode(file.read_text("utf-8", errors="replace")).ids) for file in files]
        long_enough = [document for document in tokens if _windows(document, prompt) >= 1]
        if long_enough:
            found[place.stem] = long_enough
    if not found:
        raise ValueError(f"{root}: no text is longer than {prompt + BLOCK_SIZE} tokens")
    return Texts(found, "the held-out documents" if folder is None else str(folder))
