"""Compile the inner loops in C (`KERNELS`) for a wheel or an editable installation.

The build back end calls it. `make kernels` runs it as a script, after a change of the C sources. Without a C
compiler or Python's headers the package is built without them, and their Python form serves.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script, the back end is not needed
    BuildHookInterface = object  # type: ignore[assignment, misc]

KERNELS = {
    # No contraction of a * b + c: results are bit-equal to numpy's. No traps: loops with a bound may use wide
    # registers.
    "migration/kernels": ("-ffp-contract=off", "-fno-trapping-math"),
    "router/kernels": ("-ffp-contract=off",),
    "engine_adapter/embedded/kernels": ("-ffp-contract=fast", "-Wno-psabi"),
}
"""folders of C sources, each of which becomes an extension module in it, and their own compiler flags"""
LIBRARY = "_compiled.abi3.so"
# None that lets the compiler reorder sums.
FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
)
SECONDS = 300


def digest(folder: Path) -> str:
    """Return a digest of a folder's C sources, which its library carries as `SOURCE`."""
    found = hashlib.sha256()
    for source in sources(folder):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


def sources(folder: Path) -> list[Path]:
    """Return the C sources and headers of a folder, sorted."""
    return sorted(folder.glob("*.[ch]"))


def compile_kernels(root: Path) -> str | None:
    """Compile all libraries in their places in the source tree. Return the reason if that is not possible."""
    reasons = [_compile(root / folder, flags) for folder, flags in KERNELS.items()]
    return "; ".join(reason for reason in reasons if reason is not None) or None


def _compile(folder: Path, flags: Sequence[str]) -> str | None:
    include = sysconfig.get_paths()["include"]
    if sys.platform != "linux":
        return f"there is no recipe for {sys.platform}"
    if not Path(include, "Python.h").exists():
        return f"Python's headers are missing ({include}/Python.h)"
    library = folder / LIBRARY
    # Written aside first: running processes keep the library that they have mapped.
    aside = library.with_name(f".{library.name}.{os.getpid()}")
    command = [
        *shlex.split(os.environ.get("CC") or "cc"),
        *FLAGS,
        *flags,
        f'-DSOURCE="{digest(folder)}"',
        f"-I{include}",
        *(str(source) for source in sources(folder) if source.suffix == ".c"),
        "-o",
        str(aside),
        "-lm",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            return f"{command[0]} failed: {done.stderr.strip()[-2000:]}"
        aside.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    finally:
        aside.unlink(missing_ok=True)
    return None


class KernelsHook(BuildHookInterface):
    """Compile the library, and mark the wheel as one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of a wheel are chosen. Without the library the wheel is pure Python."""
        missing = compile_kernels(Path(self.root))
        if missing is not None:
            self.app.display_warning(
                f"built without compiled inner loops, whose Python form will serve: {missing}"
            )
            return
        build_data["artifacts"].extend(f"/{folder}/{LIBRARY}" for folder in KERNELS)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


if __name__ == "__main__":
    reason = compile_kernels(Path(__file__).resolve().parent)
    sys.exit(f"inner loops were not compiled: {reason}" if reason else 0)
