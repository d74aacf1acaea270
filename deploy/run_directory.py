"""Run directory of one `roost up` or `roost worker`: logs, the private NATS store, meeting folders of ranks,
and a record of what runs.

It is $XDG_STATE_HOME/roost/run-<pid>-<random> (~/.local/state/roost/... without the variable), readable by
its user alone, and locked while its owner lives. A clean stop removes it. After a failure it stays for its
logs. A later start removes what dead runs left: stores at once, and all but the newest few directories.
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
"""directories of dead runs kept for their logs"""
LONGEST_SOCKET_FOLDER = 80
"""bytes; the path of a unix socket may have 107, including the name of the rank's socket"""
LOG_BYTES = 64 * 1024 * 1024
"""a log larger than this is rotated once"""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and folders of a run, for commands that look for one."""

    pid: int
    namespace: str
    nats: str | None = None
    router: str | None = None
    routers: tuple[str, ...] = ()
    """URL of each single router process, for /metrics, /health and /ready; empty for one process"""
    engines: tuple[str, ...] = ()
    credentials: str | None = None
    """folder with the logins of the run's NATS server; None: another server, or one without logins"""


class RunDirectory:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, name: str) -> Path:
        """Return the log file of a child; '/' in its name becomes '-'."""
        return self.path / f"{name.replace('/', '-')}.log"

    def logs(self) -> list[Path]:
        return sorted(self.path.glob("*.log"))

    def folder(self, name: str) -> Path:
        """Create and return a private folder."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def meeting_folder(self, name: str) -> Path:
        """Create a private folder with a path short enough for unix sockets. If the run directory's path is
        too long, the folder is elsewhere, with a link here."""
        path = self.path / name
        if len(os.fsencode(path)) <= LONGEST_SOCKET_FOLDER:
            return self.folder(name)
        elsewhere = Path(tempfile.mkdtemp(prefix="roost-"))
        path.symlink_to(elsewhere)
        return elsewhere

    def drop(self, name: str) -> None:
        """Remove a folder."""
        _remove(self.path / name)

    def write_record(self, running: Running) -> None:
        """Write the record of what runs, atomically."""
        draft = self.path / "running.json.new"
        private_text(draft, msgspec.json.encode(running).decode())
        draft.replace(self.path / "running.json")

    def shorten_logs(self) -> None:
        """Move aside logs that have grown too long. Writers append, so truncating the file under them is
        safe.

        Lines that arrive during the copy are copied too. Only a line written in the microseconds between the
        last check and the truncation is lost.
        """
        for log in self.logs():
            if log.stat().st_size > LOG_BYTES:
                with log.open("rb") as now, log.with_suffix(".log.old").open("wb", buffering=0) as before:
                    shutil.copyfileobj(now, before, 1 << 20)
                    while late := now.read():
                        before.write(late)
                    os.truncate(log, 0)

    def clear(self, *, keep_logs: bool) -> None:
        """Remove everything, or everything except the logs."""
        _clear(self.path, keep_logs=keep_logs)


def private_text(file: Path, text: str) -> None:
    """Write a file that is readable by its owner alone from its creation on."""
    file.unlink(missing_ok=True)
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
    ) as out:
        out.write(text)


def home(environment: Mapping[str, str]) -> Path:
    """Return the parent folder of all run directories."""
    state = environment.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state) / "roost"
    try:
        return Path.home() / ".local" / "state" / "roost"
    except RuntimeError:  # a user without a home folder
        return Path(tempfile.gettempdir()) / f"roost-{os.getuid()}"


@contextmanager
def run_directory(base: Path) -> Iterator[RunDirectory]:
    """Yield a locked run directory for this process. Left-overs of dead runs are removed first. Raises
    OSError if it cannot be created.

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
    except BaseException:  # including cancellation
        run.clear(keep_logs=False)
        raise
    else:
        run.clear(keep_logs=False)
    finally:
        os.close(lock)


def live_runs(base: Path) -> list[Running]:
    """Return the records of this user's live runs, newest first."""
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
    """Return the settings file of a live run: its own copy, rewritten at every reload. Raises OSError if
    there is none."""
    return next(base.glob(f"run-{run.pid}-*/{SETTINGS}"), base / SETTINGS).resolve(strict=True)


def _new(base: Path) -> tuple[Path, int]:
    """Create a run directory and its lock. It gets its name once it is locked, so that no process takes it
    for a dead one."""
    draft = Path(tempfile.mkdtemp(prefix="new-", dir=base))
    lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return draft.rename(base / f"run-{os.getpid()}-{secrets.token_hex(2)}"), lock


def _dead(base: Path) -> list[tuple[Path, int]]:
    """Return the directories of dead runs, newest first, each with its lock held."""
    found = [(path, lock) for path in base.glob("run-*") if (lock := _locked(path)) is not None]
    return sorted(found, key=lambda entry: -os.fstat(entry[1]).st_mtime)


def _locked(path: Path) -> int | None:
    """Return the descriptor of the lock, or None if another process holds it."""
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
    """Remove a file, a folder, or a link and the folder behind it."""
    if entry.is_dir():
        shutil.rmtree(entry.resolve(), ignore_errors=True)
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
