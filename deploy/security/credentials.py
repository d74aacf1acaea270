"""Logins of a private NATS server: one user for each role and each engine, drawn at random for every run, in files that their owner alone may read.

Parts get the path of their file; no login is in an argument or a variable. Commands find the operator's file by the run directory.
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
"""in the run directory"""
_SECRET_BYTES = 32


class ServerCredentials:
    """Of one server. Written when it is made; `tell` adds where the server is."""

    def __init__(self, folder: Path, subjects: Subjects, engines: Iterable[str]) -> None:
        """engines: whose users may speak for themselves alone. The user `engine` is for those that join later, under any name."""
        self.folder = folder
        self._subjects = subjects
        wanted: list[tuple[Role, str | None]] = [*((role, None) for role in ROLES), *(("engine", name) for name in engines)]
        self._users = [(_drawn(user_name(role, engine)), role, engine or "*") for role, engine in wanted]
        self.tell(None)

    def tell(self, url: str | None) -> None:
        """Write every user's file. url: of the server, once it is known; for people's own programs."""
        for login, _, _ in self._users:
            said = {"user": login.user, "password": login.password, "inbox_prefix": login.inbox_prefix, **({"url": url} if url else {})}
            draft = self.folder / f"{login.user}.new"
            private_text(draft, msgspec.json.encode(said).decode() + "\n")
            draft.replace(self.folder / f"{login.user}.json")

    def file(self, role: Role, engine: str | None = None) -> Path:
        """That of a role, or of one engine."""
        return credentials_file(self.folder, role, engine)

    def login(self, role: Role) -> Login:
        return next(login for login, known, engine in self._users if known == role and engine == "*")

    def authorization(self) -> str:
        """What the server's configuration must say."""
        return server_users(self._subjects, self._users)


def credentials_file(folder: Path, role: Role, engine: str | None = None) -> Path:
    """The file of a role in a folder of credentials; of an engine that has none of its own, that of all engines."""
    own = folder / f"{user_name(role, engine)}.json"
    return own if engine is None or own.exists() else folder / f"{role}.json"


def of_run(run: Running, role: Role, engine: str | None = None) -> Path | None:
    """The file with which to speak to a run's NATS server; None where it asks for none."""
    return None if run.credentials is None else credentials_file(Path(run.credentials), role, engine)


def _drawn(user: str) -> Login:
    return Login(user, secrets.token_urlsafe(_SECRET_BYTES), inbox_prefix(user))
