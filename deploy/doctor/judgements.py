"""Judgements on a deployment: values in, findings out. Pure; the time comes in as an argument."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from bus import StoreUse
from bus.nats.server_report import ServerReport, UserRights
from bus.protocol.permissions import lacking, rights
from bus.protocol.roles import ROLES, Role
from bus.protocol.subjects import Subjects
from fleet.event import PROTOCOL, understands
from fleet.text import byte_size, counted, duration, listed

OLDEST_NATS = (2, 10)
CLOCK_SECONDS = 2.0
"""Largest harmless difference of clocks: more spoils certificates, logs and times of events."""
CERTIFICATE_DAYS = 14.0
"""A certificate that ends earlier should be renewed now."""
SLOW_SECONDS = 1.0
"""An HTTP server that takes longer for its health check is in trouble."""
FREE_BYTES = {"disk": 1 << 30, "shared memory": 64 << 20}
"""Least free space, by kind of file system."""
FEWEST_DESCRIPTORS = 4096
_HEALTHY = (200, 401, 403)
"""Statuses of a server that is well; some tell it only to those with a key."""
_DAY = 86400.0

Level = Literal["problem", "note"]


class DeploymentFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check that is not in order. problem: something does not work, or will soon not."""

    check: str
    level: Level
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DoorReport:
    """Answer of one HTTP server to a health check."""

    name: str
    url: str
    status: int | None
    """None: no answer"""
    error: str = ""
    seconds: float = 0.0
    certificate_ends: float | None = None
    """Unix seconds; None: plain HTTP"""
    untrusted: bool = False
    """its certificate cannot be verified; `error` says why"""
    is_other_program: bool = False
    """it answers, and not as a part of Roost does"""
    protocol: int | None = None
    """protocol that a router states; None: it states none"""


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """One file system."""

    kind: Literal["disk", "shared memory"]
    path: str
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class SecretFile:
    """A file that holds a secret. mode: its permission bits."""

    path: str
    mode: int


def problem(check: str, what: str, remedy: str) -> DeploymentFinding:
    return DeploymentFinding(check=check, level="problem", what=what, remedy=remedy)


def note(check: str, what: str, remedy: str) -> DeploymentFinding:
    return DeploymentFinding(check=check, level="note", what=what, remedy=remedy)


# NATS


def judge_server(where: str, report: ServerReport, now: float) -> list[DeploymentFinding]:
    """Judge the server itself: version, JetStream, clock, certificate."""
    found = []
    version = tuple(int(number) for number in re.findall(r"\d+", report.version)[:2])
    if version < OLDEST_NATS:
        found.append(
            problem(
                "versions",
                f"the NATS server at {where} is of version {report.version or 'unknown'}",
                f"update it to {'.'.join(map(str, OLDEST_NATS))} or newer",
            )
        )
    if not report.jetstream:
        found.append(
            problem(
                "jetstream",
                f"the NATS server at {where} has no JetStream",
                "start it with -js, or `jetstream {}`",
            )
        )
    if report.clock_offset is not None:
        found += judge_clocks({f"the NATS server at {where}": report.clock_offset})
    return found + judge_certificate(f"the NATS server at {where}", report.certificate_ends, now)


def judge_rights(
    user: str, report: ServerReport, role: Role, subjects: Subjects, engine: str
) -> list[DeploymentFinding]:
    """Judge whether a user has the rights of its role. engine: the only one that it acts for; `*`: any."""
    if report.publish is None or report.subscribe is None:
        return [
            note(
                "rights",
                f"the rights of user {user} cannot be read",
                "write the server's authorization anew with `roost bus credentials`, which lets users ask for"
                " their own rights, and reload the server",
            )
        ]
    wanted = rights(role, subjects, engine, report.user or None)
    found = []
    for what, needs, has in (
        ("publish on", wanted.publish, report.publish),
        ("listen to", wanted.subscribe, report.subscribe),
    ):
        if missing := lacking(needs, _allowed(has), has.deny):
            found.append(
                problem(
                    "rights",
                    f"user {user} ({role}) may not {what} {listed(missing, 3)}",
                    f"give it the rights of its role (roost bus permissions --role {role}), or write the"
                    " server's authorization anew with `roost bus credentials`, and reload the server",
                )
            )
    return found


def _allowed(has: UserRights) -> tuple[str, ...]:
    return (">",) if has.allow is None else has.allow


def role_of(user: str) -> tuple[Role, str] | None:
    """Return the role of a user of `roost bus credentials`, and the engine that it acts for (`*`: any); None
    for any other name.
    """
    for role in ROLES:
        if user == role:
            return role, "*"
    return ("engine", user.removeprefix("engine-")) if user.startswith("engine-") else None


def judge_stores(stores: Iterable[StoreUse]) -> list[DeploymentFinding]:
    """Judge the fill of the server's stores."""
    return [
        problem(
            "jetstream",
            f"the store for {one.store} is nearly full: {byte_size(one.used)} of {byte_size(one.capacity)}",
            "raise max_bytes of its stream or bucket on the NATS server",
        )
        for one in stores
        if one.alarming
    ]


# Parts


def judge_parts(*, planner: bool, tracker: bool, router: bool, engines: int) -> list[DeploymentFinding]:
    """Judge which parts answer on the bus."""
    found = []
    if not router:
        found.append(problem("parts", "no router answers on the bus", "start `roost router`; see its log"))
    if not engines:
        found.append(
            problem("parts", "no engine has joined", "start `roost worker`, and compare its [bus] namespace")
        )
    if not planner:
        found.append(
            note("parts", "no planner answers: experts stay where they are", "start `roost planner`")
        )
    if not tracker:
        found.append(
            note(
                "parts",
                "no tracker answers: experts are not predicted, and demand is not learnt",
                "start `roost tracker`",
            )
        )
    return found


def judge_silence(joined: Iterable[str], heard: Iterable[str], seconds: float) -> list[DeploymentFinding]:
    """Judge engines that joined and send no heartbeat. seconds: the listening time."""
    silent = sorted(set(joined).difference(heard))
    return [
        problem(
            "engines",
            f"engine {name} has joined and sent no heartbeat in {seconds:g} s: it died, hangs, or lost NATS",
            "see its log, and restart it; its join is forgotten when another engine of its name joins",
        )
        for name in silent
    ]


def judge_clocks(offsets: Mapping[str, float]) -> list[DeploymentFinding]:
    """Judge clocks against ours. offsets: seconds by which each is ahead."""
    wrong = {name: offset for name, offset in offsets.items() if abs(offset) > CLOCK_SECONDS}
    ours = len(wrong) > 1 and len(wrong) == len(offsets)
    return [
        problem(
            "clocks",
            f"the clock of {name} is {duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} this"
            f" machine's{', as all others are: this one is probably wrong' if ours else ''}",
            "synchronise the clocks of all machines (chrony or systemd-timesyncd)",
        )
        for name, offset in sorted(wrong.items())
    ]


def judge_protocols(protocols: Mapping[str, int]) -> list[DeploymentFinding]:
    """Judge the protocols that parts state, against ours."""
    found = []
    for name, protocol in sorted(protocols.items()):
        stated = f"protocol {protocol}" if protocol else "no protocol, as before protocol 1"
        what = f"{name} speaks {stated}; this version of Roost speaks {PROTOCOL}"
        if not understands(protocol):
            remedy = "parts two or more apart ignore one another: update in steps of one"
            found.append(problem("versions", what, remedy))
        elif protocol != PROTOCOL:
            found.append(note("versions", what, "parts one apart work together; finish the update"))
    return found


def judge_messages(rejected: Mapping[str, int]) -> list[DeploymentFinding]:
    """Judge messages that could not be read. rejected: their number, by reason."""
    found = []
    if count := rejected.get("kind", 0):
        found.append(
            problem(
                "versions",
                f"{counted(count, 'message')} of a kind that this version does not know: a part is newer",
                "bring all parts to one version; newer parts may run beside older ones during an update",
            )
        )
    if count := sum(rejected.get(reason, 0) for reason in ("envelope", "payload", "oversize")):
        found.append(
            problem(
                "versions",
                f"{counted(count, 'message')} that cannot be read",
                "look for programs that publish in this namespace, and for parts of another version",
            )
        )
    return found


# HTTP


def judge_door(door: DoorReport, now: float) -> list[DeploymentFinding]:
    """Judge an HTTP server of a router or of a rank."""
    where = f"{door.name} at {door.url}"
    if door.untrusted:
        return [
            problem(
                "tls",
                f"the certificate of {where} cannot be verified: {door.error}",
                "renew it; or name its authority (--ca), or an address for which it was issued",
            )
        ]
    if door.status is None:
        return [
            problem(
                "doors",
                f"{where} does not answer: {door.error}",
                "see whether it runs, and whether a firewall or a wrong host name keeps this machine from it",
            )
        ]
    found = judge_certificate(where, door.certificate_ends, now)
    if door.is_other_program:
        found.append(
            problem(
                "ports",
                f"another program than {door.name} answers at {door.url}",
                "give one of them another port, and correct the URL",
            )
        )
    elif door.status not in _HEALTHY:
        found.append(problem("doors", f"{where} answers its health check with {door.status}", "see its log"))
    elif door.seconds > SLOW_SECONDS:
        found.append(
            problem(
                "doors",
                f"{where} took {duration(door.seconds)} for its health check",
                "see the load of its machine, and of the network between",
            )
        )
    return found


def judge_certificate(name: str, ends: float | None, now: float) -> list[DeploymentFinding]:
    """Judge the end of a certificate. ends, now: Unix seconds; None: there is none."""
    if ends is None or ends - now > CERTIFICATE_DAYS * _DAY:
        return []
    left = (ends - now) / _DAY
    when = f"ends in {left:.1f} days" if left > 0 else f"ended {-left:.1f} days ago"
    return [problem("tls", f"the certificate of {name} {when}", "renew it; parts read it again at a reload")]


# This machine


def judge_space(space: SpaceReport) -> list[DeploymentFinding]:
    """Judge the free space of a file system."""
    if space.free >= FREE_BYTES[space.kind]:
        return []
    remedy = {
        "disk": "make room, or move the files (XDG_STATE_HOME for run directories)",
        "shared memory": (
            "make /dev/shm larger (docker: --shm-size; Kubernetes: an emptyDir with medium Memory), or remove"
            " segments of dead processes"
        ),
    }
    return [
        problem(
            "space",
            f"{space.path} ({space.kind}) has {byte_size(space.free)} free of {byte_size(space.total)}",
            remedy[space.kind],
        )
    ]


def judge_descriptors(limit: int) -> list[DeploymentFinding]:
    """Judge the limit of open files."""
    if limit >= FEWEST_DESCRIPTORS:
        return []
    return [
        problem(
            "descriptors",
            f"a process here may open {limit} files; each request of a router may need two",
            f"raise the hard limit to {FEWEST_DESCRIPTORS} or more (LimitNOFILE= of systemd, ulimit -Hn)",
        )
    ]


def judge_secret(file: SecretFile) -> list[DeploymentFinding]:
    """Judge who may read a file with a secret."""
    if not file.mode & 0o077:
        return []
    return [
        problem(
            "secrets",
            f"other users may read or change {file.path} ({file.mode & 0o777:o})",
            f"chmod 600 {file.path}",
        )
    ]
