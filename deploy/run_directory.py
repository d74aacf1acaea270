"""The run directory of one `roost up` or `roost worker`: logs, the private NATS store, meeting places of ranks, and what runs where.

It is $XDG_STATE_HOME/roost/run-<pid>-<chance> (~/.local/state/roost/... without the variable), readable by its user alone, locked while
its owner lives. A clean stop removes it; after a failure it stays for its logs, and a later start removes what the dead left:
stores at once, whole directories beyond the newest few.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

SETTINGS = "roost.toml"
KEPT = 5
"""directories of dead runs that stay for their logs"""
LONGEST_SOCKET_FOLDER = 80
"""bytes; a unix socket's path may have 107, and a rank's socket needs a name in it"""
LOG_BYTES = 64 * 1024 * 1024
"""a log that has grown beyond this is moved aside, once"""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a run serves, for commands that look for it."""

    pid: int
    namespace: str
    nats: str | None = None
    router: str | None = None
    routers: tuple[str, ...] = ()
    """URL of each of several router processes alone, for /metrics, /health and /ready"""
    engines: tuple[str, ...] = ()
    credentials: str | None = None
    """folder with the logins of the run's NATS server; None: another server, or one that asks for none"""


class RunDirectory:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, name: str) -> Path:
        """The log file of a child; '/' in its name becomes '-'."""
        return self.path / f"{name.replace('/', '-')}.log"

    def logs(self) -> list[Path]:
        return sorted(self.path.glob("*.log"))

    def folder(self, name: str) -> Path:
        """A private folder."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def meeting_folder(self, name: str) -> Path:
        """A new private folder with a path short enough for unix sockets; where ours is too long, somewhere else, with a link to it here."""
        path = self.path / name
        if len(os.fsencode(path)) <= LONGEST_SOCKET_FOLDER:
            return self.folder(name)
        elsewhere = Path(tempfile.mkdtemp(prefix="roost-"))
        path.symlink_to(elsewhere)
        return elsewhere

    def drop(self, name: str) -> None:
        """Remove a folder."""
        _remove(self.path / name)

    def tell(self, running: Running) -> None:
        """Write down what runs, whole or not at all."""
        draft = self.path / "running.json.new"
        private_text(draft, msgspec.json.encode(running).decode())
        draft.replace(self.path / "running.json")

    def shorten_logs(self) -> None:
        """Move logs aside that have grown too long. Their writers append, so cutting the file under them is safe.

        Lines that come during the copy are copied too; only one written in the microseconds between the last look and the cut is lost.
        """
        for log in self.logs():
            if log.stat().st_size > LOG_BYTES:
                with log.open("rb") as now, log.with_suffix(".log.old").open("wb", buffering=0) as before:
                    shutil.copyfileobj(now, before, 1 << 20)
                    while late := now.read():
                        before.write(late)
                    os.truncate(log, 0)

    def clear(self, *, keep_logs: bool) -> None:
        """Remove everything, or everything but the logs."""
        _clear(self.path, keep_logs=keep_logs)


def private_text(file: Path, text: str) -> None:
    """Write a file that its owner alone may read, from its first moment on."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def home(environment: Mapping[str, str]) -> Path:
    """Where run directories are."""
    state = environment.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state) / "roost"
    try:
        return Path.home() / ".local" / "state" / "roost"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"roost-{os.getuid()}"


@contextmanager
def run_directory(base: Path) -> Iterator[RunDirectory]:
    """A locked run directory for this process; OSError when it cannot be made. Left-overs of the dead are cleared first.

    Removed at the end, unless an exception ends the run: then its logs stay.
    """
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number, (path, lock) in enumerate(_dead(base)):
        _clear(path, keep_logs=number < KEPT)
        os.close(lock)
    path, lock = _new(base)
    run = RunDirectory(path)
    try:
        yield run
    except Exception:
        run.clear(keep_logs=True)
        raise
    except BaseException:  # told to stop
        run.clear(keep_logs=False)
        raise
    else:
        run.clear(keep_logs=False)
    finally:
        os.close(lock)


def live_runs(base: Path) -> list[Running]:
    """What the live runs of this user serve, newest first."""
    found: list[tuple[float, Running]] = []
    for path in base.glob("run-*"):
        lock = _locked(path)
        if lock is not None:
            os.close(lock)
            continue
        with contextlib.suppress(OSError, msgspec.DecodeError):
            file = path / "running.json"
            found.append((file.stat().st_mtime, msgspec.json.decode(file.read_bytes(), type=Running)))
    return [running for _, running in sorted(found, key=lambda entry: -entry[0])]


def settings_file(base: Path, run: Running) -> Path:
    """The settings that a live run's processes use: its own copy, written anew when settings are read again. OSError when there is none."""
    return next(base.glob(f"run-{run.pid}-*/{SETTINGS}"), base / SETTINGS).resolve(strict=True)


def _new(base: Path) -> tuple[Path, int]:
    """A new run directory and its lock; it gets its name when it is locked, so that nobody can take it for a dead one."""
    draft = Path(tempfile.mkdtemp(prefix="new-", dir=base))
    lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return draft.rename(base / f"run-{os.getpid()}-{secrets.token_hex(2)}"), lock


def _dead(base: Path) -> list[tuple[Path, int]]:
    """Directories whose owner is gone, newest first, each with its lock held."""
    found = [(path, lock) for path in base.glob("run-*") if (lock := _locked(path)) is not None]
    return sorted(found, key=lambda entry: -os.fstat(entry[1]).st_mtime)


def _locked(path: Path) -> int | None:
    """Its lock, when nobody else holds it."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _clear(path: Path, *, keep_logs: bool) -> None:
    for entry in path.iterdir():
        if not keep_logs or not entry.name.endswith((".log", ".log.old", "lock")):
            _remove(entry)
    if not keep_logs:
        shutil.rmtree(path, ignore_errors=True)


def _remove(entry: Path) -> None:
    """A file, a folder, or a link and the folder behind it."""
    if entry.is_dir():
        shutil.rmtree(entry.resolve(), ignore_errors=True)
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
