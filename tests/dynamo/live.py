"""Roost inside a real Dynamo: its unmodified frontend before our engines.

make test-dynamo      # the tests of tests/dynamo
make record-dynamo    # writes the messages that the fast tests replay anew instead
"""

import os
import subprocess
import sys

from tests.dynamo.environment import FOLDER, ROOT, install


def main(words: list[str]) -> int:
    """Run the tests, or record. Returns the exit status."""
    python = FOLDER / "bin" / "python"
    environment = {**os.environ, "ROOST_DYNAMO_PYTHON": str(python)}
    recording = "--record" in words
    command = (
        ["-m", "tests.dynamo.record"]
        if recording
        else ["-m", "pytest", "tests/dynamo", "-m", "slow or not slow"]
    )
    more = [word for word in words if word != "--record"]
    return subprocess.run([sys.executable, *command, *more], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
