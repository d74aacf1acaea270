"""Roles on the bus, the server users that have them, and the inboxes of these users. Pure."""

from dataclasses import dataclass
from typing import Literal, get_args

from bus.protocol.subjects import check_token

Role = Literal["engine", "router", "tracker", "planner", "operator", "subscriber"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """A user of a server; never printed."""

    user: str
    password: str
    inbox_prefix: str
    """first tokens of the subjects for answers to this user; no other user may subscribe to them"""


def user_name(role: Role, engine: str | None = None) -> str:
    """Return the user name of a role: `router`; `engine-NAME` for one engine, `engine` for engines of unknown
    name.

    ValueError for an invalid engine name.
    """
    return role if engine is None else f"{role}-{check_token('engine name', engine)}"


def inbox_prefix(user: str) -> str:
    """Return the first tokens of the subjects for answers to a user. They are its own, so that permissions
    can exclude others.
    """
    return f"_INBOX.{user}"
