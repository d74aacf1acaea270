"""Users of simulated engines: long prompts that fill large KV caches, answers of seconds up to minutes, each
token of which is known beforehand."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine_adapter.simulated.model.text import Script, WordTokenizer
from tests.system.load_clients import Prompt

DOMAINS = ("law", "code", "news", "verse")
DOCUMENTS = 12
"""of a domain, which prompts begin with"""
DOCUMENT_TOKENS = (2048, 12288)
OWN_TOKENS = (64, 4096)
"""of a prompt alone, behind the document that it shares"""
FRESH_SHARE = 0.5
"""of the prompts begin with no document"""
VOCABULARY = 256
"""ids that prompts are made of: plain bytes"""


class Length(NamedTuple):
    """One kind of answer: its share of the requests, and its least and most tokens."""

    share: float
    least: int
    most: int


LENGTHS = (Length(0.60, 16, 60), Length(0.25, 150, 400), Length(0.15, 700, 1300))
"""at a tenth of a second a token: seconds, tens of seconds, minutes"""


class LongLibrary:
    """Prompts and answers of many lengths. The simulated engine's tokens follow from prompt and position,
    whoever computes them."""

    domains = DOMAINS

    def __init__(self, seed: int, lengths: Sequence[Length] = LENGTHS) -> None:
        dice = np.random.default_rng((seed, 99))
        self._documents = [[_ids(dice, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)] for _ in DOMAINS]
        self._numbers = itertools.count()
        self._lengths = lengths
        self._tokenizer = WordTokenizer()

    def any_of(self, domain: int, dice: np.random.Generator) -> Prompt:
        shared = (
            _ids(dice, DOCUMENT_TOKENS)
            if dice.random() < FRESH_SHARE
            else self._documents[domain][int(dice.integers(DOCUMENTS))]
        )
        chosen = self._lengths[
            int(dice.choice(len(self._lengths), p=[length.share for length in self._lengths]))
        ]
        tokens = int(dice.integers(chosen.least, chosen.most + 1))
        return Prompt(next(self._numbers), domain, shared + _ids(dice, OWN_TOKENS), tokens)

    def expected(self, prompt: Prompt) -> list[int]:
        """What the answer must be, token by token."""
        script = Script(self._tokenizer, prompt.ids, 0, 0)
        return [script.token(len(prompt.ids) + at) for at in range(prompt.tokens)]


def _ids(dice: np.random.Generator, between: tuple[int, int]) -> list[int]:
    return [int(one) for one in dice.integers(0, VOCABULARY, int(dice.integers(*between)))]
