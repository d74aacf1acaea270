"""Every subject name, in Dynamo's convention; the only strings of their kind.

Telemetry of an endpoint: `namespace.<ns>.component.<component>.endpoint.<endpoint>.<topic>` (Dynamo's own two topics, so that
its router could listen). Everything of Roost: `namespace.<ns>.component.<component>.<topic>[.<more>]`. What an engine writes, or answers, has
its name behind the topic, so that a server's permissions can keep it to its own (`bus.nats.permissions`).
"""

import re
from typing import Literal

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUBJECT_TOKEN = re.compile(r"[^\s.*>]+")
_KEY = re.compile(r"[A-Za-z0-9_/=-]+(\.[A-Za-z0-9_/=-]+)*")


def check_token(kind: str, token: str) -> str:
    """A name that may stand between two dots of a subject; ValueError says what is allowed."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{kind} {token!r}: use 1 to 64 letters, digits, '-' or '_'")
    return token


def check_subject(subject: str, *, wildcards: bool = False) -> str:
    """A subject that may be sent to (or, with wildcards, listened to); ValueError says what is wrong with it."""
    tokens = subject.split(".")
    for place, token in enumerate(tokens):
        wild = wildcards and (token == "*" or (token == ">" and place == len(tokens) - 1))
        if not wild and not _SUBJECT_TOKEN.fullmatch(token):
            raise ValueError(f"subject {subject!r}: token {token!r} is not allowed here; take subjects from bus.protocol.subjects")
    return subject


def check_key(key: str) -> str:
    """A key that may be claimed; ValueError says what is allowed."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}: use letters, digits, '-', '_', '/', '=' and single dots between them")
    return key


def matches(pattern: str, subject: str) -> bool:
    """Whether a pattern covers a subject: `*` stands for one token, a last `>` for one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(want in ("*", token) for want, token in zip(wanted, tokens, strict=True))


def engine_of(subject: str) -> str | None:
    """The engine whose name stands in a subject that engines write; None for any other subject."""
    tokens = subject.split(".", 6)
    return tokens[5] if len(tokens) > 5 and tokens[3] == "backend" and tokens[4] != "endpoint" else None


class Subjects:
    """The subjects of one namespace. ValueError when the namespace is no subject token."""

    def __init__(self, namespace: str = "roost") -> None:
        self.namespace = check_token("namespace", namespace)
        self._engines = f"namespace.{namespace}.component.backend"
        self._roost = f"namespace.{namespace}.component"

    def _of(self, engine: str, topic: str) -> str:
        """What one engine says, or answers; `*`: all engines."""
        return f"{self._engines}.{topic}.{engine if engine == '*' else check_token('engine name', engine)}"

    @property
    def kv_events(self) -> str:
        return f"{self._engines}.endpoint.generate.{KV_EVENTS}"

    @property
    def kv_metrics(self) -> str:
        return f"{self._engines}.endpoint.generate.{KV_METRICS}"

    def heartbeats(self, engine: str = "*") -> str:
        return self._of(engine, "heartbeat")

    def experts(self, engine: str = "*") -> str:
        """What an engine's ranks activated."""
        return self._of(engine, "experts")

    def dispatched(self, engine: str = "*") -> str:
        """Where tokens were really sent."""
        return self._of(engine, "dispatched")

    def requests_profiled(self, engine: str = "*") -> str:
        """What requests activated, by the ranks that served them."""
        return self._of(engine, "requests")

    @property
    def requests_read(self) -> str:
        """The same of servers that do not say it here, by the router that read it in their answers."""
        return f"{self._roost}.router.profiled"

    @property
    def requests_finished(self) -> str:
        """What routers knew and expected of requests that are over."""
        return f"{self._roost}.router.requests"

    @property
    def imports(self) -> str:
        """Counts from other systems."""
        return f"{self._roost}.tracker.import"

    @property
    def clusters(self) -> str:
        return f"{self._roost}.tracker.clusters"

    @property
    def tables(self) -> str:
        """Prediction tables and their changes."""
        return f"{self._roost}.tracker.tables"

    @property
    def shifts(self) -> str:
        """That popularity shifted, or settled."""
        return f"{self._roost}.tracker.shift"

    @property
    def profiles(self) -> str:
        return f"{self._roost}.tracker.profile"

    @property
    def demand(self) -> str:
        return f"{self._roost}.tracker.demand"

    @property
    def describe_profile(self) -> str:
        """Request: what the tracker knows of a model (profile, clusters, tables or all of it for people)."""
        return f"{self._roost}.tracker.describe"

    def describe_engine(self, engine: str, worker_id: int | Literal["*"]) -> str:
        """Request: an engine's EngineJoined."""
        return f"{self._of(engine, 'describe')}.{worker_id}"

    def kv_snapshot(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: what a rank's KV cache holds."""
        return f"{self._of(engine, 'snapshot')}.{worker_id}.{rank}"

    def membership(self, engine: str = "*") -> str:
        """Stored: joins and leaves of an engine, by name."""
        return self._of(engine, "membership")

    def placements(self, engine: str = "*") -> str:
        """Stored: placements an engine has served."""
        return f"{self._roost}.migration.placement.{engine if engine == '*' else check_token('engine name', engine)}"

    @property
    def homes(self) -> str:
        """Which ranks are home to which clusters of requests."""
        return f"{self._roost}.migration.homes"

    @property
    def describe_plan(self) -> str:
        """Request: what the planner would do with an engine."""
        return f"{self._roost}.migration.describe"

    def migrations(self, engine: str = "*") -> str:
        """Stored: what became of plans, and of their handovers."""
        return f"{self._roost}.migration.handover.{engine if engine == '*' else check_token('engine name', engine)}"

    @property
    def migrate(self) -> str:
        """Request: carry something out."""
        return f"{self._roost}.migration.carry-out"

    @property
    def loop(self) -> str:
        """Request: what the migration service does by itself, and whether it shall."""
        return f"{self._roost}.migration.loop"

    @property
    def loop_key(self) -> str:
        """Key under which stands what the migration service must not forget of its own doing: that it is paused, and what it learnt of its plans."""
        return "migration.loop"

    def handover(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: commands of the coordinator to one rank."""
        return f"{self._of(engine, 'handover')}.{worker_id}.{rank}"

    def handovers(self, engine: str = "*") -> str:
        """Where an engine's ranks are with their handovers."""
        return self._of(engine, "handovers")

    def leases(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: of one rank of an engine to another, to read its experts."""
        return f"{self._of(engine, 'lease')}.{worker_id}.{rank}"

    def drains(self, engine: str = "*", rank: int | Literal["*"] | None = "*") -> str:
        """Stored: whether an operator wants no new requests on a rank, or (None) on all ranks of an engine."""
        name = engine if engine == "*" else check_token("engine name", engine)
        return f"{self._roost}.router.drain.{name}.{'all' if rank is None else rank}"

    def config(self, part: str = "*") -> str:
        """Stored: settings that a part took, or refused, while it ran."""
        return f"{self._roost}.config.{part if part == '*' else check_token('part', part)}"

    @property
    def reservations(self) -> str:
        """What routers have booked."""
        return f"{self._roost}.router.reservations"

    def describe_reservations(self, router: int | str = "*") -> str:
        """Request: what one router knows to be booked."""
        return f"{self._roost}.router.describe.{router}"

    @property
    def route(self) -> str:
        """Request: where would, or shall, this go? One of the routers answers."""
        return f"{self._roost}.router.route"

    @property
    def release(self) -> str:
        """Request: a reserved request is over. One of the routers answers."""
        return f"{self._roost}.router.release"

    def decision(self, tag: str) -> str:
        """Request: a decision, of the router whose decisions' ids begin with this tag."""
        return f"{self._roost}.router.decision.{tag if tag == '*' else check_token('decision tag', tag)}"

    @property
    def stored(self) -> tuple[str, ...]:
        """What JetStream keeps."""
        return (self.membership(), self.placements(), self.migrations(), self.drains(), self.config())

    @property
    def published(self) -> tuple[str, ...]:
        """What is said openly, stored or not; no questions, and not what routers tell each other of single conversations."""
        return (
            self.kv_events,
            self.kv_metrics,
            self.heartbeats(),
            self.experts(),
            self.dispatched(),
            self.requests_profiled(),
            self.requests_read,
            self.requests_finished,
            self.handovers(),
            self.profiles,
            self.demand,
            self.clusters,
            self.tables,
            self.shifts,
            self.homes,
            *self.stored,
        )

    @property
    def everything(self) -> str:
        return f"namespace.{self.namespace}.>"

    def claim(self, engine: str) -> str:
        """Key under which an engine's name is claimed."""
        return f"engine.{engine if engine == '*' else check_token('engine name', engine)}"

    @property
    def coordinator(self) -> str:
        """Key under which the leading migration service holds its lease."""
        return "migration.coordinator"

    def handover_key(self, engine: str) -> str:
        """Key under which an engine's open handover is kept."""
        return f"handover.{engine if engine == '*' else check_token('engine name', engine)}"
