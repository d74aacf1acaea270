"""Run a command that dies with its parent: `python -I -S parent_death.py PARENT_PID COMMAND...` replaces the
command.

This program asks the kernel for a signal when the parent ends, then becomes the command (exec keeps the
request). So a child also dies when its parent is killed with -9, and no Python code runs between fork and
exec of a process with threads. The parent may have died before the request, so its process id is compared.
Linux only. It is started as a file, not as a module: it costs about 15 ms and imports nothing of Roost.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def wrapped(command: Sequence[str], parent: int) -> list[str]:
    """Return the command line that runs `command` so that it dies with the process `parent`, which must start
    it."""
    return [sys.executable, "-I", "-S", __file__, str(parent), *command]


def main(arguments: Sequence[str]) -> None:
    """Tie this process to its parent and become the command; exit with 127 if there is no such command."""
    parent, command = int(arguments[0]), list(arguments[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"cannot be tied to the parent process: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent process is gone already")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
