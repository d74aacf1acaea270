"""Counters of one worker between two reports: pairs by physical expert, steps, their duration."""

import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Counts(NamedTuple):
    """Counters of an interval."""

    slots: NDArray[np.int64]
    """[layers, slots of all ranks]: (token, k) pairs by physical expert"""
    balance: NDArray[np.float64]
    """[layers]: mean / highest load of a rank, summed over the steps; empty: this rank does not see all
    tokens"""
    steps: int
    seconds: float


class Counters:
    """Sums on the device; adding to them never waits for it.

    ranks: expert ranks; sees_all: this rank counts the tokens of all ranks, so a step's balance is known."""

    def __init__(self, layers: int, slots: int, ranks: int, device: torch.device, *, sees_all: bool) -> None:
        self._ranks = ranks
        self._sees_all = sees_all
        self._slots = torch.zeros((layers, slots), dtype=torch.int64, device=device)
        self._balance = torch.zeros(layers, dtype=torch.float64, device=device)
        self._watch = StepWatch(device)
        self._steps = 0
        self._flying: tuple[torch.Tensor, torch.Tensor, torch.Event | None, int, float] | None = None

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        self._watch.start()

    def add(self, load: torch.Tensor) -> None:
        """Add the load of one step, [layers, slots of all ranks]."""
        self._watch.stop()
        self._steps += 1
        self._slots += load
        if self._sees_all:
            ranks = load.view(len(load), self._ranks, -1).sum(dim=-1)
            highest = ranks.amax(dim=1)
            self._balance += torch.where(
                highest > 0, ranks.sum(dim=1) / self._ranks / highest.clamp(min=1), 1.0
            )

    def launch(self) -> None:
        """Start to copy the sums to the host, and begin anew. Nothing happens while an earlier copy is under
        way."""
        if not self._steps or self._flying is not None:
            return
        event = None
        slots, balance = (
            self._slots.to("cpu", copy=True, non_blocking=True),
            self._balance.to("cpu", copy=True, non_blocking=True),
        )
        if self._slots.device.type != "cpu":
            event = torch.Event()
            event.record()
        self._flying = (slots, balance, event, self._steps, self._watch.take())
        self._slots.zero_()
        self._balance.zero_()
        self._steps = 0

    def land(self, *, wait: bool = False) -> Counts | None:
        """Return the sums that were launched, once the device has copied them. wait: wait for the device."""
        if self._flying is None:
            return None
        slots, balance, event, steps, seconds = self._flying
        if event is not None and not wait and not event.query():
            return None
        if event is not None:
            event.synchronize()
        self._flying = None
        known = balance.numpy() if self._sees_all else np.zeros(0)
        return Counts(slots.numpy(), known, steps, seconds)


class StepWatch:
    """Duration of steps: by the wall clock on the CPU, by the device's own events elsewhere, where the host
    only queues the work."""

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._started: float | None = None
        self._seconds = 0.0
        self._begin: torch.Event | None = None
        self._pairs: list[tuple[torch.Event, torch.Event]] = []

    def start(self) -> None:
        """Begin a step."""
        if self._on_host:
            self._started = time.perf_counter()
            return
        self._begin = torch.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """End the step that was begun, if one was."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None
        if self._begin is not None:
            end = torch.Event(enable_timing=True)
            end.record()
            self._pairs.append((self._begin, end))
            self._begin = None

    def take(self) -> float:
        """Return the seconds of the steps that are over, and begin anew. Steps that the device has yet to
        finish count next time."""
        over = [pair for pair in self._pairs if pair[1].query()]
        self._pairs = self._pairs[len(over) :]
        seconds, self._seconds = self._seconds, 0.0
        return seconds + sum(begin.elapsed_time(end) for begin, end in over) / 1000
