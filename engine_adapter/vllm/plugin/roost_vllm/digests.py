"""Digests of experts' weights and scales, computed with torch on the device that holds them.

A digest is a sum over 32-bit words, each times a multiplier of its own position, in 64-bit arithmetic that
wraps; so exchanged words change it. Words are taken in rows: the multipliers are those of one row, and the
rows are the digits of a polynomial. A row is a few kilobytes, so that work can stop after any number of rows.
"""

import time
from collections.abc import Iterator, Sequence

import torch

_ROW_WORDS = 4096
_BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial: odd, so that no digit is lost."""
_WRAP = 1 << 64


def _signed(number: int) -> int:
    number %= _WRAP
    return number - _WRAP if number >= _WRAP // 2 else number


def _mixed(number: int) -> int:
    """Return the number with its bits mixed (SplitMix64)."""
    number = (number + _BASE) % _WRAP
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % _WRAP
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % _WRAP
    return number ^ (number >> 31)


class ExpertHasher:
    """Digests on one device. rows: rows that one piece of work takes at most."""

    def __init__(self, device: torch.device, rows: int = 32) -> None:
        self._rows = rows
        self._words = torch.tensor([_signed(_mixed(i) | 1) for i in range(_ROW_WORDS)], device=device)
        powers = [pow(_BASE, rows - i, _WRAP) for i in range(rows + 1)]
        self._powers = torch.tensor([_signed(power) for power in powers], device=device)
        """[rows + 1]: base to the power rows, ..., 1, 0"""

    def pieces(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> Iterator[None]:
        """Compute the digest of one expert, a piece at a time, and write it into `into`, a scalar int64.
        tensors: its weights and scales, in their order."""
        total = torch.zeros((), dtype=torch.int64, device=into.device)
        for tensor in tensors:
            words = _as_words(tensor)
            total = total * self._powers[-2] + len(words) + 1
            whole = len(words) // _ROW_WORDS
            for at in range(0, whole, self._rows):
                rows = words[at * _ROW_WORDS : min(at + self._rows, whole) * _ROW_WORDS].view(-1, _ROW_WORDS)
                sums = (rows.to(torch.int64) * self._words).sum(dim=1)
                powers = self._powers[-len(sums) - 1 :]
                total = total * powers[0] + (sums * powers[1:]).sum()
                yield
            rest = words[whole * _ROW_WORDS :]
            if len(rest):
                total = total * self._powers[-2] + (rest.to(torch.int64) * self._words[: len(rest)]).sum()
                yield
        into.copy_(total)

    def digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the digest of one expert, a scalar int64."""
        into = torch.zeros((), dtype=torch.int64, device=self._words.device)
        for _ in self.pieces(tensors, into):
            pass
        return into


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat int32 (int16 or uint8 where they do not divide), without a copy if it
    is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    data = flat.view(torch.uint8)
    for words, size in ((torch.int32, 4), (torch.int16, 2)):
        if data.numel() % size == 0 and data.data_ptr() % size == 0:
            return data.view(words)
    return data


def digest_text(value: int) -> str:
    """Return a digest as 16 hexadecimal digits."""
    return f"{value % _WRAP:016x}"


class SlotCheck:
    """Digests of some slots of this rank, computed a slice at a time between forward passes.

    weights: [layers][tensors], each [slots of this rank, ...]. slots: the (layer, slot) pairs to compute."""

    def __init__(
        self,
        hasher: ExpertHasher,
        weights: Sequence[Sequence[torch.Tensor]],
        slots: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.slots = list(slots)
        self._found = torch.zeros(len(self.slots), dtype=torch.int64, device=device)
        self._work = self._pieces(hasher, weights)
        self.is_done = False

    def _pieces(self, hasher: ExpertHasher, weights: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        for at, (layer, slot) in enumerate(self.slots):
            yield from hasher.pieces([tensor[slot] for tensor in weights[layer]], self._found[at])

    def advance(self, seconds: float, pieces: int = 16) -> None:
        """Work for some time, and for at most that many pieces: on a device the work is only queued here, so
        time alone bounds nothing."""
        end = time.perf_counter() + seconds
        for _ in range(pieces):
            if next(self._work, self) is self:
                self.is_done = True
                return
            if time.perf_counter() > end:
                return

    def found(self) -> list[int]:
        """Return the digests in the order of `slots`, once all are done."""
        return [int(value) for value in self._found.tolist()]
