"""Demand by expert from the files of SGLang's expert distribution recorder.

The recorder writes its counts to the server's disk, and forgets them then. So a second user would take them
away from SGLang's own EPLB, which plans by them: where that is enabled, the agent neither starts the recorder
nor has it write, and only reads the files that appear."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import Activations, EngineFailed
from engine_adapter.sglang.discovery import RecorderUse
from engine_adapter.sglang.server import SglangServer
from fleet.experts import ModelShape

PATTERN = "expert_distribution_recorder_*.pt"
MAX_BYTES = 1 << 30
WRITE_SECONDS = 10.0
"""Time after which a dump that was asked for is expected to be a complete file."""
_PAUSE_SECONDS = 0.1
log = logging.getLogger(__name__)


ReadCounts = Callable[[bytes], NDArray[np.float64]]
"""Reader of a file: float64 [layers with experts, experts] (token, k) pairs of all ranks. ValueError for a
file that it cannot read, or that counts nothing."""


class RecorderFollower:
    """Reads what one start of SGLang records, and reports it to the targets. `run` follows until
    cancelled."""

    def __init__(
        self,
        server: SglangServer,
        folder: Path,
        use: RecorderUse,
        shape: ModelShape,
        read: ReadCounts,
        report: Callable[[Sequence[Activations]], None],
        *,
        targets: int,
        seconds: float,
    ) -> None:
        """report: takes the activations of each target."""
        self.unreadable = 0
        """Files that could not be used."""
        self._server = server
        self._folder = folder
        self._use = use
        self._shape = shape
        self._read = read
        self._report = report
        self._targets = targets
        self._seconds = seconds
        self._known = self._files()

    async def run(self) -> None:
        """Follow the recorder until cancelled. A server that refuses its recorder is logged, and asked
        again."""
        started = self._use != "ours"
        while True:
            try:
                if not started:
                    await self._server.start_recorder()
                    started = True
                await asyncio.sleep(self._seconds)
                if self._use == "ours":
                    await self._server.dump_recorder()
                    await self._written()
            except EngineFailed as error:
                log.warning("the expert distribution recorder: %s", error)
                await asyncio.sleep(self._seconds)
            for file in sorted(self._files() - self._known):
                await self._take(file)

    def _files(self) -> set[Path]:
        return set(self._folder.glob(PATTERN))

    async def _written(self) -> None:
        """Wait for a new file whose size has stopped changing. EngineFailed when none comes."""
        sizes: dict[Path, int] = {}
        for _ in range(int(WRITE_SECONDS / _PAUSE_SECONDS)):
            await asyncio.sleep(_PAUSE_SECONDS)
            now = {file: file.stat().st_size for file in self._files() - self._known}
            if now and now == sizes:
                return
            sizes = now
        raise EngineFailed(
            f"no file {PATTERN} has come to {self._folder}; is it SGLang's"
            " SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR, on this machine?"
        )

    async def _take(self, file: Path) -> None:
        """Report the counts of a file. It is removed if it was written for the agent."""
        self._known.add(file)
        try:
            counts = await asyncio.to_thread(self._counts, file)
            self._report(split(counts, self._targets, self._shape.top_k))
        except (OSError, ValueError) as error:
            self.unreadable += 1
            # also the file of an idle interval
            log.info("%s: nothing is learnt from it: %s", file, error)
        else:
            if self._use == "ours":
                await asyncio.to_thread(file.unlink, missing_ok=True)

    def _counts(self, file: Path) -> NDArray[np.int64]:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        found = self._read(file.read_bytes())
        expected = (self._shape.layers, self._shape.experts)
        if found.shape != expected:
            raise ValueError(f"it counts {found.shape} layers and experts, the model has {expected}")
        return np.asarray(np.rint(found), np.int64)


def split(counts: NDArray[np.int64], targets: int, top_k: int) -> list[Activations]:
    """Split the counts of all ranks, int64 [layers, experts], evenly: the recorder does not say which rank's
    requests activated an expert."""
    share, rest = counts // targets, counts % targets
    parts = [share + (rest > target) for target in range(targets)]
    return [Activations(part, int(part.sum(axis=1).max(initial=0)) // top_k, 0) for part in parts]
