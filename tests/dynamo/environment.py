"""Environment of its own for Dynamo's frontend and mocker (.venv-dynamo: some 700 MB, made once).

Roost's own processes need Dynamo's runtime alone, which is installed with them (extra `dynamo`). The frontend
is in the package ai-dynamo, which requires a performance model that the public index holds only as a
placeholder, so it is installed without its dependencies. None of them is torch.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-dynamo"
PYTHON = Path(os.environ.get("ROOST_DYNAMO_PYTHON", FOLDER / "bin" / "python"))
VERSION = "1.6.1"
_PACKAGES = (
    ["install", f"ai-dynamo-runtime=={VERSION}"],
    ["install", "--no-deps", f"ai-dynamo=={VERSION}"],
    [
        "install",
        "aiohttp",
        "certifi",
        "kubernetes<33",
        "msgspec",
        "prometheus-client",
        "pyzmq",
        "redis",
        "tokenizers",
        "tqdm",
        "transformers",
        "uvloop",
        "zstandard",
    ],
)


def install() -> None:
    """Make the environment if it is not there. subprocess.CalledProcessError when pip fails."""
    if (FOLDER / ".installed").exists():
        return
    print(f"making {FOLDER} with ai-dynamo {VERSION}: some 700 MB", file=sys.stderr)
    python = FOLDER / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for words in _PACKAGES:
        subprocess.run([str(python), "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)
    (FOLDER / ".installed").touch()
