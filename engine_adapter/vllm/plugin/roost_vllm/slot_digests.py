"""Digests of this rank's slots, compared with those of the experts that the map names."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from roost_vllm.digests import ExpertHasher, SlotCheck, digest_text
from roost_vllm.identity import Identity
from roost_vllm.maps import Table
from roost_vllm.wire import ExpertDigests, SlotMismatch

_CHECK_SECONDS = 0.001
"""Time for digests after one step; the last piece may exceed it, so that a slice stays under 2 ms."""


class SlotDigests:
    """Digests of the slots of one rank.

    table: map at the start. digests: of all slots of all ranks at the start, int64 [layers, slots of all
    ranks]. weights: [layers][tensors], each [slots of this rank, ...]. mismatches: all that were found."""

    def __init__(
        self,
        identity: Identity,
        table: Table,
        digests: np.ndarray,
        hasher: ExpertHasher,
        weights: Sequence[Sequence[torch.Tensor]],
        device: torch.device,
    ) -> None:
        self._identity = identity
        self._hasher = hasher
        self._weights = weights
        self._device = device
        self._known, self.mismatches = first_digests(table, digests, identity.experts)
        self._own = digests[:, identity.own].copy()
        """[layers, slots of this rank]: as last computed"""
        self._check: SlotCheck | None = None

    def recheck(self, old: Table, new: Table) -> None:
        """Check the slots that a map changed, and those that were not yet checked."""
        own = self._identity.own
        changed = {(int(layer), int(slot)) for layer, slot in np.argwhere(old[:, own] != new[:, own])}
        pending = self._check.slots if self._check is not None else []
        slots = sorted({*changed, *pending})
        self._check = SlotCheck(self._hasher, self._weights, slots, self._device)

    def advance(self, table: Table) -> list[SlotMismatch] | None:
        """Compute some digests between two steps. Returns what differs from `table`, the map in force, once
        all are done; None before, and when there is nothing to do."""
        check = self._check
        if check is None:
            return None
        check.advance(_CHECK_SECONDS)
        if not check.is_done:
            return None
        found = list(self._differences(table, check))
        self.mismatches += found
        self._check = None
        return found

    def _differences(self, table: Table, check: SlotCheck) -> Iterable[SlotMismatch]:
        first = self._identity.own.start
        for (layer, slot), value in zip(check.slots, check.found(), strict=True):
            self._own[layer, slot] = value
            expert = int(table[layer, first + slot])
            expected, found = self._known[layer][expert], digest_text(value)
            if found != expected:
                yield SlotMismatch(
                    layer=layer, slot=first + slot, expert=expert, expected=expected, found=found
                )

    def told(self, served: str) -> ExpertDigests:
        """Return the message with the digests of all slots of this rank, those still to be checked left
        empty: they are of the map before. served: digest of the map in force."""
        unchecked = set() if self._check is None else set(self._check.slots)
        rows = tuple(
            tuple("" if (layer, slot) in unchecked else digest_text(int(value)) for slot, value in row)
            for layer, row in enumerate(map(enumerate, self._own))
        )
        return ExpertDigests(served=served, digests=rows)


def first_digests(
    table: Table, digests: np.ndarray, experts: int
) -> tuple[list[list[str]], list[SlotMismatch]]:
    """Return the digest of each expert [layers][experts] as its first copy has it, and the copies that
    differ.

    table: map at the start. digests: int64 [layers, slots of all ranks]."""
    known = [[""] * experts for _ in table]
    mismatches = []
    for layer, slot in np.ndindex(table.shape):
        expert, found = int(table[layer, slot]), digest_text(int(digests[layer, slot]))
        expected = known[layer][expert] = known[layer][expert] or found
        if found != expected:
            mismatches.append(
                SlotMismatch(layer=layer, slot=slot, expert=expert, expected=expected, found=found)
            )
    return known, mismatches
