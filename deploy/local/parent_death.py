"""Run a command that dies with its parent: `python -I -S lifeline.py PARENT_PID COMMAND...`, in the place of the command.

It asks the kernel for a signal when the parent ends, then becomes the command (exec keeps the request). So a child dies also
when its parent is killed with -9, and no Python code runs between fork and exec of a process with threads. The parent may
have died before the request: that is what its process id is compared for. Linux only. Started as a file, not as a module, so
that it costs some 15 ms and imports nothing of ours.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def wrapped(command: Sequence[str], parent: int) -> list[str]:
    """The command line that runs `command` so that it dies with the process `parent`, which must be the one that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(parent), *command]


def main(arguments: Sequence[str]) -> None:
    """Tie this process to its parent and become the command; exits with 127 when there is no such command."""
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
