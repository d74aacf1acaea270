"""All subject names, in Dynamo's convention. No other module builds subjects from strings.

Telemetry of an endpoint: `namespace.<ns>.component.<component>.endpoint.<endpoint>.<topic>` (Dynamo's own two
topics, so that Dynamo's router could subscribe). Roost's own:
`namespace.<ns>.component.<component>.<topic>[.<more>]`. Subjects on which an engine publishes or answers have
its name after the topic, so that a server's permissions can restrict it to its own
(`bus.protocol.permissions`).
"""

import re
from typing import Literal

KV_EVENTS = "kv-events"
KV_METRICS = "kv_metrics"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SUBJECT_TOKEN = re.compile(r"[^\s.*>]+")
_KEY = re.compile(r"[A-Za-z0-9_/=-]+(\.[A-Za-z0-9_/=-]+)*")


def check_token(kind: str, token: str) -> str:
    """Return a valid token of a subject. ValueError names the allowed characters."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{kind} {token!r}: use 1 to 64 letters, digits, '-' or '_'")
    return token


def check_subject(subject: str, *, wildcards: bool = False) -> str:
    """Return a valid subject to publish on (or, with wildcards, to subscribe to). ValueError names the
    defect.
    """
    tokens = subject.split(".")
    for place, token in enumerate(tokens):
        wild = wildcards and (token == "*" or (token == ">" and place == len(tokens) - 1))
        if not wild and not _SUBJECT_TOKEN.fullmatch(token):
            raise ValueError(
                f"subject {subject!r}: token {token!r} is not allowed here; take subjects from"
                " bus.protocol.subjects"
            )
    return subject


def check_key(key: str) -> str:
    """Return a valid key for a claim. ValueError names the allowed characters."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}: use letters, digits, '-', '_', '/', '=' and single dots between them")
    return key


def matches(pattern: str, subject: str) -> bool:
    """Return True if a pattern matches a subject: `*` matches one token, a last `>` one or more."""
    expected, tokens = pattern.split("."), subject.split(".")
    if expected[-1] == ">":
        expected = expected[:-1]
        if len(tokens) <= len(expected):
            return False
        tokens = tokens[: len(expected)]
    return len(expected) == len(tokens) and all(
        one in ("*", token) for one, token in zip(expected, tokens, strict=True)
    )


def engine_of(subject: str) -> str | None:
    """Return the engine named in a subject that engines publish on; None for any other subject."""
    tokens = subject.split(".", 6)
    return tokens[5] if len(tokens) > 5 and tokens[3] == "backend" and tokens[4] != "endpoint" else None


class Subjects:
    """Subjects of one namespace. ValueError if the namespace is not a subject token."""

    def __init__(self, namespace: str = "roost") -> None:
        self.namespace = check_token("namespace", namespace)
        self._engines = f"namespace.{namespace}.component.backend"
        self._roost = f"namespace.{namespace}.component"

    def _of(self, engine: str, topic: str) -> str:
        """Return a subject on which one engine publishes or answers; `*`: all engines."""
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
        """Expert activations of an engine's ranks."""
        return self._of(engine, "experts")

    def dispatched(self, engine: str = "*") -> str:
        """Measured dispatch of tokens."""
        return self._of(engine, "dispatched")

    def requests_profiled(self, engine: str = "*") -> str:
        """Activations of requests, reported by the ranks that served them."""
        return self._of(engine, "requests")

    def tokens_sampled(self, engine: str = "*") -> str:
        """Experts of sampled tokens of finished requests."""
        return self._of(engine, "tokens")

    @property
    def requests_read(self) -> str:
        """Activations of requests on servers that do not report them here, published by the router that read
        them in responses.
        """
        return f"{self._roost}.router.profiled"

    @property
    def requests_finished(self) -> str:
        """Features and predictions of finished requests, from routers."""
        return f"{self._roost}.router.requests"

    @property
    def imports(self) -> str:
        """Activation counts from other systems."""
        return f"{self._roost}.tracker.import"

    @property
    def clusters(self) -> str:
        return f"{self._roost}.tracker.clusters"

    @property
    def tables(self) -> str:
        """Prediction tables, as snapshots and deltas."""
        return f"{self._roost}.tracker.tables"

    @property
    def shifts(self) -> str:
        """Shifts of popularity, and their end."""
        return f"{self._roost}.tracker.shift"

    @property
    def tracker_heartbeat(self) -> str:
        return f"{self._roost}.tracker.heartbeat"

    @property
    def profiles(self) -> str:
        return f"{self._roost}.tracker.profile"

    @property
    def demand(self) -> str:
        return f"{self._roost}.tracker.demand"

    @property
    def describe_profile(self) -> str:
        """Request: tracker state of a model (profile, clusters, tables, or a summary for display)."""
        return f"{self._roost}.tracker.describe"

    def describe_engine(self, engine: str, worker_id: int | Literal["*"]) -> str:
        """Request: an engine's EngineJoined."""
        return f"{self._of(engine, 'describe')}.{worker_id}"

    def kv_snapshot(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: contents of a rank's KV cache."""
        return f"{self._of(engine, 'snapshot')}.{worker_id}.{rank}"

    def membership(self, engine: str = "*") -> str:
        """Stored: joins and leaves, by engine name."""
        return self._of(engine, "membership")

    def placements(self, engine: str = "*") -> str:
        """Stored: placements that an engine has served."""
        return f"{self._roost}.migration.placement.{_any_or(engine)}"

    @property
    def homes(self) -> str:
        """Home ranks of request clusters."""
        return f"{self._roost}.migration.homes"

    @property
    def describe_plan(self) -> str:
        """Request: the plan that the planner would make for an engine now."""
        return f"{self._roost}.migration.describe"

    def migrations(self, engine: str = "*") -> str:
        """Stored: outcomes of plans and of their handovers."""
        return f"{self._roost}.migration.handover.{_any_or(engine)}"

    @property
    def migrate(self) -> str:
        """Request: execute an operator's plan."""
        return f"{self._roost}.migration.carry-out"

    @property
    def loop(self) -> str:
        """Request: state of the automatic control loop, and switching it on or off."""
        return f"{self._roost}.migration.loop"

    @property
    def loop_key(self) -> str:
        """Key for the control loop's persistent state: pause, and calibration learnt from earlier plans."""
        return "migration.loop"

    def handover(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: commands of the coordinator to one rank, and the memory that it uses."""
        return f"{self._of(engine, 'handover')}.{worker_id}.{rank}"

    def handovers(self, engine: str = "*") -> str:
        """Handover state of an engine's ranks."""
        return self._of(engine, "handovers")

    def leases(self, engine: str, worker_id: int | Literal["*"], rank: int | Literal["*"]) -> str:
        """Request: read lease on experts, from one rank of an engine to another."""
        return f"{self._of(engine, 'lease')}.{worker_id}.{rank}"

    def drains(self, engine: str = "*", rank: int | Literal["*"] | None = "*") -> str:
        """Stored: drains and resumes of a rank, or (None) of all ranks of an engine."""
        name = engine if engine == "*" else check_token("engine name", engine)
        return f"{self._roost}.router.drain.{name}.{'all' if rank is None else rank}"

    def config(self, part: str = "*") -> str:
        """Stored: settings that a running part applied or refused."""
        return f"{self._roost}.config.{part if part == '*' else check_token('part', part)}"

    @property
    def reservations(self) -> str:
        """Bookings of routers."""
        return f"{self._roost}.router.reservations"

    def describe_reservations(self, router: int | str = "*") -> str:
        """Request: all bookings of one router."""
        return f"{self._roost}.router.describe.{router}"

    @property
    def route(self) -> str:
        """Request: a routing decision, with or without reservation. One of the routers answers."""
        return f"{self._roost}.router.route"

    @property
    def release(self) -> str:
        """Request: end of a reserved request. One of the routers answers."""
        return f"{self._roost}.router.release"

    def decision(self, tag: str) -> str:
        """Request: a decision, from the router whose decision ids begin with this tag."""
        return f"{self._roost}.router.decision.{tag if tag == '*' else check_token('decision tag', tag)}"

    @property
    def stored(self) -> tuple[str, ...]:
        """Subjects that JetStream keeps."""
        return (self.membership(), self.placements(), self.migrations(), self.drains(), self.config())

    @property
    def published(self) -> tuple[str, ...]:
        """Public subjects, stored or not. Excludes requests, and messages between routers about single
        conversations.
        """
        return (
            self.kv_events,
            self.kv_metrics,
            self.heartbeats(),
            self.experts(),
            self.dispatched(),
            self.requests_profiled(),
            self.tokens_sampled(),
            self.requests_read,
            self.requests_finished,
            self.handovers(),
            self.profiles,
            self.demand,
            self.clusters,
            self.tables,
            self.shifts,
            self.tracker_heartbeat,
            self.homes,
            *self.stored,
        )

    @property
    def everything(self) -> str:
        return f"namespace.{self.namespace}.>"

    def claim(self, engine: str) -> str:
        """Return the key under which an engine's name is claimed."""
        return f"engine.{engine if engine == '*' else check_token('engine name', engine)}"

    @property
    def coordinator(self) -> str:
        """Key under which the leading migration service holds its lease."""
        return "migration.coordinator"

    def handover_key(self, engine: str) -> str:
        """Return the key under which an engine's open handover is stored."""
        return f"handover.{engine if engine == '*' else check_token('engine name', engine)}"


def _any_or(engine: str) -> str:
    """Return "*" as it is, and any other name after a check."""
    return engine if engine == "*" else check_token("engine name", engine)
