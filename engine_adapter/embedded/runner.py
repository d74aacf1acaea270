"""The forward pass of one rank: work in, logits and routing out. Knows pages and positions, nothing of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

PAGE_TOKENS = 16
"""Positions per KV page; equal to the block size that identities are computed with."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence wants from one step: `tokens` computed at positions start, start + 1, ..."""

    tokens: Sequence[int]
    """ids to compute now, at least one"""
    start: int
    """position of tokens[0]; the KV of every earlier position is already in `pages`"""
    pages: Sequence[int]
    """ids of the pages that cover positions 0 .. start + len(tokens) - 1, in order; more are allowed"""
    wants_logits: bool
    """whether the logits behind the last of `tokens` are wanted"""


@dataclass(frozen=True, slots=True)
class Forward:
    """What a step gives back."""

    logits: torch.Tensor
    """fp32 [works that want logits, vocabulary], in the order of the works"""
    routed: NDArray[Any]
    """uint8 (uint16 above 256 experts) [tokens, layers, k]: the experts chosen for every computed token, works in order, tokens in order"""
