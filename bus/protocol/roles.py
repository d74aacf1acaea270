"""Who speaks on the bus: roles, the users of a server that have them, and where answers to a user arrive. Pure."""

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
    """first tokens of the subjects to which this user's answers come, and to which nobody else may listen"""


def user_name(role: Role, engine: str | None = None) -> str:
    """The user of a role: `router`; of one engine `engine-NAME`, and of engines whose name is not known before `engine`. ValueError for a name that
    cannot be an engine's."""
    return role if engine is None else f"{role}-{check_token('engine name', engine)}"


def inbox_prefix(user: str) -> str:
    """First tokens of the subjects for answers to a user: its own, so that permissions can keep others out."""
    return f"_INBOX.{user}"
