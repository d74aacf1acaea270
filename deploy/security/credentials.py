"""Logins of a private NATS server: one user per role and engine, generated at random for every run, in files
readable by their owner alone.

Parts get the path of their file; no login is in an argument or a variable. Commands find the operator's file
through the run directory.
"""

import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bus.protocol.permissions import server_users
from bus.protocol.roles import ROLES, Login, Role, inbox_prefix, user_name
from bus.protocol.subjects import Subjects
from deploy.run_directory import Running, private_text

FOLDER = "bus"
"""subfolder of the run directory"""
_SECRET_BYTES = 32


class ServerCredentials:
    """Logins of one server. The files are written at construction; `tell` adds the server's URL."""

    def __init__(self, folder: Path, subjects: Subjects, engines: Iterable[str]) -> None:
        """Generate the logins. engines: each gets a user that may publish for that engine alone. The user
        `engine` is for engines that join later, under any name."""
        self.folder = folder
        self._subjects = subjects
        users: list[tuple[Role, str | None]] = [
            *((role, None) for role in ROLES),
            *(("engine", name) for name in engines),
        ]
        self._users = [(_drawn(user_name(role, engine)), role, engine or "*") for role, engine in users]
        self.write_files(None)

    def write_files(self, url: str | None) -> None:
        """Write every user's file. url: of the server, once known; for people's own programs."""
        for login, _, _ in self._users:
            content = {
                "user": login.user,
                "password": login.password,
                "inbox_prefix": login.inbox_prefix,
                **({"url": url} if url else {}),
            }
            draft = self.folder / f"{login.user}.new"
            private_text(draft, msgspec.json.encode(content).decode() + "\n")
            draft.replace(self.folder / f"{login.user}.json")

    def file(self, role: Role, engine: str | None = None) -> Path:
        """Return the file of a role, or of one engine."""
        return credentials_file(self.folder, role, engine)

    def login(self, role: Role) -> Login:
        return next(login for login, known, engine in self._users if known == role and engine == "*")

    def authorization(self) -> str:
        """Return the `authorization` block of the server's configuration."""
        return server_users(self._subjects, self._users)


def credentials_file(folder: Path, role: Role, engine: str | None = None) -> Path:
    """Return the credentials file of a role in a folder; for an engine without its own, the file of all
    engines."""
    own = folder / f"{user_name(role, engine)}.json"
    return own if engine is None or own.exists() else folder / f"{role}.json"


def of_run(run: Running, role: Role, engine: str | None = None) -> Path | None:
    """Return the file with the login for a run's NATS server; None if that needs none."""
    return None if run.credentials is None else credentials_file(Path(run.credentials), role, engine)


def _drawn(user: str) -> Login:
    return Login(user, secrets.token_urlsafe(_SECRET_BYTES), inbox_prefix(user))
