"""The compiled client and mock engines: built once a run with the machine's C compiler, from the sources
beside this file."""

import asyncio
import contextlib
import os
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.rig.load_client import BadAnswer, Sample, request_bytes
from benchmarks.rig.mock_engine import MODELS, STREAM, WHOLE
from benchmarks.rig.processes import Started, free_port, process

_SOURCES = Path(__file__).parent
_LENGTH = struct.Struct("=Q")
_SAMPLE = struct.Struct("=3d")
_FIGURES = struct.Struct("=2d")
_COMPILE = (os.environ.get("CC", "cc"), "-O2", "-D_GNU_SOURCE")


class Load(NamedTuple):
    """Answers to one load. Seconds; processor: of the client."""

    samples: list[Sample]
    wall: float
    processor: float


class Wire:
    """The built programs, and the folder for what they read."""

    def __init__(self, folder: Path) -> None:
        """Build them. RuntimeError without a working C compiler."""
        self._folder = folder
        for name in ("load_client", "mock_engine"):
            command = [*_COMPILE, "-o", str(folder / name), str(_SOURCES / f"{name}.c")]
            try:
                built = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise RuntimeError(f"no C compiler ({error}): install one, or set CC") from error
            if built.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {built.stderr.strip()}")
        answers = (MODELS, WHOLE[False], b"".join(STREAM[False]), WHOLE[True], b"".join(STREAM[True]))
        self._answers = self._written("answers", answers)

    def _written(self, name: str, pieces: Iterable[bytes]) -> Path:
        file = self._folder / name
        file.write_bytes(b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces))
        return file

    @contextlib.asynccontextmanager
    async def mock_engines(self, count: int) -> AsyncIterator[list[Started]]:
        """Run `count` mock engines, one process each."""
        async with contextlib.AsyncExitStack() as stack:
            engines = []
            for _ in range(count):
                port = free_port()
                command = [str(self._folder / "mock_engine"), str(port), str(self._answers)]
                pid = await stack.enter_async_context(process(command, f"http://127.0.0.1:{port}/v1/models"))
                engines.append(Started(port, pid))
            yield engines

    async def call_all(
        self, port: int, path: str, bodies: Iterable[bytes], *, connections: int, seconds: float = 600.0
    ) -> Load:
        """Send `bodies` as `load_client.call_all` does. BadAnswer with the client's words."""
        requests = self._written("requests", (request_bytes(path, body, port) for body in bodies))
        client = await asyncio.create_subprocess_exec(
            *(str(self._folder / "load_client"), str(port), str(connections), str(seconds), str(requests)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        output, errors = await client.communicate()
        if client.returncode:
            raise BadAnswer(errors.decode(errors="replace"))
        wall, processor = _FIGURES.unpack_from(output)
        samples = [
            Sample(first, whole, int(size))
            for first, whole, size in _SAMPLE.iter_unpack(output[_FIGURES.size :])
        ]
        return Load(samples, wall, processor)


@contextlib.contextmanager
def built() -> Iterator[Wire]:
    """Build the programs into a temporary folder. RuntimeError without a working C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        yield Wire(Path(folder))
