"""On a real nats-server: without credentials nothing, and with those of a role what the role does, and no
more."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import api

from bus import BusError, ClaimLost, Message
from bus.claims import ClaimLease
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.roles import ROLES
from bus.protocol.subjects import Subjects
from deploy.security.credentials import ServerCredentials
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat, EngineLeft, RankDrained
from fleet.facts.migrations import MigrationAborted
from fleet.requests.control_loop import DescribeLoop, SetLoopState
from fleet.requests.refusal import RequestRefused

SUBJECTS = Subjects()
CONFIG = BusConfig(connect_seconds=2.0, request_seconds=1.0, record_seconds=3.0, reconnect_max_seconds=0.2)


class Server:
    """A server with every role's user, and users of the engines a and b."""

    def __init__(self, url: str, credentials: ServerCredentials) -> None:
        self.url = url
        self.credentials = credentials

    @asynccontextmanager
    async def bus(self, user: str) -> AsyncIterator[NatsBus]:
        """Roost's own client, as a user."""
        bus = await NatsBus.connect(
            self.url, SUBJECTS, replace(CONFIG, credentials_file=self.credentials.folder / f"{user}.json")
        )
        try:
            yield bus
        finally:
            await bus.close()

    @asynccontextmanager
    async def stranger(self, user: str) -> AsyncIterator["Stranger"]:
        """A program of somebody else's with a user's credentials, that keeps to no rules."""
        stored = json.loads((self.credentials.folder / f"{user}.json").read_text())
        refused: list[str] = []

        async def on_error(error: Exception) -> None:
            refused.append(str(error))

        client = await nats.connect(
            self.url,
            user=stored["user"],
            password=stored["password"],
            inbox_prefix=stored["inbox_prefix"],
            error_cb=on_error,
        )
        try:
            yield Stranger(client, refused)
        finally:
            await client.close()


class Stranger:
    """What it is refused is in `refused`."""

    def __init__(self, client: nats.NATS, refused: list[str]) -> None:
        self.client = client
        self.refused = refused

    async def may_publish(self, subject: str, payload: bytes = b"") -> bool:
        return await self._tried(self.client.publish(subject, payload))

    async def may_listen(self, subject: str) -> bool:
        return await self._tried(self.client.subscribe(subject))

    async def _tried(self, attempt: Any) -> bool:
        before = len(self.refused)
        await attempt
        for _ in range(2):  # the first ping may overtake it
            await self.client.flush()
        return len(self.refused) == before


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, nats_server_type: Any) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("permitted")
    (folder / "bus").mkdir()
    credentials = ServerCredentials(folder / "bus", SUBJECTS, ("a", "b"))
    (folder / "nats.conf").write_text(f"jetstream: enabled\n{credentials.authorization()}")
    running = nats_server_type(folder / "store", "-c", str(folder / "nats.conf"))
    running.start()
    yield Server(running.url, credentials)
    running.stop()


@pytest.fixture
async def furnished(server: Server) -> Server:
    """With streams and buckets, and something stored."""
    async with server.bus("planner") as bus:
        await bus.record(
            SUBJECTS.migrations("a"),
            MigrationAborted(
                engine="a", worker_id=1, plan="p", handover=1, number=0, epoch=1, reason="", fault="room"
            ),
        )
    return server


def left(engine: str) -> EngineLeft:
    return EngineLeft(engine=engine, worker_id=1, reason="")


async def test_without_credentials_or_with_wrong_ones_nobody_gets_in(server: Server, tmp_path: Path) -> None:
    (tmp_path / "guess.json").write_text('{"user": "operator", "password": "guess"}')
    for file in (None, tmp_path / "guess.json"):
        with pytest.raises(BusError, match="refuses this user"):
            await NatsBus.connect(
                server.url, SUBJECTS, replace(CONFIG, connect_seconds=0.5, credentials_file=file)
            )


@pytest.mark.parametrize("user", ["engine", "engine-a", "router", "tracker", "planner", "operator"])
async def test_every_part_may_begin_alone_with_an_empty_server(
    user: str, tmp_path: Path, nats_server_type: Any
) -> None:
    credentials = ServerCredentials(tmp_path, SUBJECTS, ("a",))
    (tmp_path / "nats.conf").write_text(f"jetstream: enabled\n{credentials.authorization()}")
    running = nats_server_type(tmp_path / "store", "-c", str(tmp_path / "nats.conf"))
    running.start()
    try:
        async with Server(running.url, credentials).bus(user) as bus:
            assert [one async for one in bus.replay(SUBJECTS.membership(), follow=False)] == []
            assert await bus.read_claim("engine.a") is None
    finally:
        running.stop()


# A read-only subscriber


async def test_a_subscriber_hears_and_replays_what_is_said_openly(furnished: Server) -> None:
    async with furnished.stranger("subscriber") as reader, furnished.bus("engine-a") as engine:
        for subject in SUBJECTS.published:
            assert await reader.may_listen(subject), subject
        subscription = await reader.client.subscribe(SUBJECTS.heartbeats("a"))
        for _ in range(2):  # the first ping may overtake it
            await reader.client.flush()
        await engine.publisher(SUBJECTS.heartbeats("a")).publish(
            EngineHeartbeat(engine="a", worker_id=1, epoch=0)
        )
        assert (await subscription.next_msg(5)).subject == SUBJECTS.heartbeats("a")
        stored = await reader.client.jetstream().subscribe(SUBJECTS.migrations(), ordered_consumer=True)
        assert (await stored.next_msg(5)).subject == SUBJECTS.migrations("a")
        assert reader.refused == []


async def test_a_subscriber_says_steers_and_removes_nothing_and_reads_neither_claims_nor_questions(
    furnished: Server,
) -> None:
    async with furnished.stranger("subscriber") as reader:
        for subject in (
            *(subject.replace("*", "x") for subject in SUBJECTS.published),
            SUBJECTS.loop,
            SUBJECTS.migrate,
            SUBJECTS.route,
            SUBJECTS.describe_engine("a", 1),
            "$KV.roost-claims.engine.a",
            "$O.roost-blobs.C.x",
            *(
                f"$JS.API.STREAM.{what}.roost-stored"
                for what in ("PURGE", "DELETE", "UPDATE", "CREATE", "MSG.GET", "MSG.DELETE")
            ),
            *(f"$JS.API.STREAM.{what}.KV_roost-claims" for what in ("PURGE", "DELETE", "INFO", "MSG.GET")),
            "$JS.API.DIRECT.GET.KV_roost-claims.$KV.roost-claims.engine.a",
            "$JS.API.CONSUMER.CREATE.KV_roost-claims",
            "$JS.API.CONSUMER.CREATE.OBJ_roost-blobs",
            "$JS.API.STREAM.MSG.GET.OBJ_roost-blobs",
            "_INBOX.router.x",
        ):
            assert not await reader.may_publish(subject), subject
        for subject in (
            ">",
            "_INBOX.>",
            "_INBOX.operator.>",
            SUBJECTS.everything,
            SUBJECTS.route,
            SUBJECTS.loop,
            SUBJECTS.reservations,
            SUBJECTS.handover("a", 1, 0),
            SUBJECTS.leases("a", 1, 0),
            SUBJECTS.kv_snapshot("a", 1, 0),
            "$KV.>",
            "$JS.API.>",
            "$O.>",
        ):
            assert not await reader.may_listen(subject), subject


async def test_a_subscriber_cannot_pause_the_planner_and_is_told_why_not_at_once(furnished: Server) -> None:
    attempts: list[Any] = []

    async def answer(message: Any) -> Any:
        attempts.append(message)
        return RequestRefused(reason="it came through")

    async with (
        furnished.bus("planner") as planner,
        planner.serve(SUBJECTS.loop, answer),
        furnished.bus("operator") as operator,
    ):
        with pytest.raises(BusError, match="it came through"):
            await operator.request(SUBJECTS.loop, DescribeLoop())
        async with furnished.bus("tracker") as other:
            with pytest.raises(
                BusError,
                match=r"user 'tracker' may not publish on .*migration\.loop; .*roost bus permissions",
            ):
                await other.request(SUBJECTS.loop, SetLoopState(paused=True, reason="hostile"), 0.5)
    assert attempts == [DescribeLoop()]


async def test_nonsense_that_a_subscriber_has_a_server_write_into_a_claim_ends_no_engine(
    furnished: Server,
) -> None:
    """A server sends its answers wherever a question names, whatever the asker may publish on (nats-server
    2.15): the claim is overwritten with the answer, and its holder writes it anew."""
    async with furnished.bus("engine-b") as bus, furnished.stranger("subscriber") as hostile:
        claim = ClaimLease(bus, SUBJECTS.claim("b"), worker_id=7, node="n")
        await claim.take()
        await hostile.client.publish(
            "$JS.API.STREAM.INFO.roost-stored", b"", reply="$KV.roost-claims.engine.b"
        )
        async with asyncio.timeout(5):
            while (await read(bus, "engine.b")).startswith(b'{"worker_id":7'):  # noqa: ASYNC110 the server tells nobody
                await asyncio.sleep(0.01)
        await claim.refresh()
        assert (await read(bus, "engine.b")).startswith(b'{"worker_id":7')
        await claim.release()


async def read(bus: NatsBus, key: str) -> bytes:
    found = await bus.read_claim(key)
    assert found is not None
    return found.value


# An engine


async def test_an_engine_speaks_answers_and_claims_under_its_own_name_alone(furnished: Server) -> None:
    async with furnished.stranger("engine-b") as hostile:
        own, other = (
            [
                getattr(SUBJECTS, name)(engine)
                for name in (
                    "membership",
                    "heartbeats",
                    "experts",
                    "dispatched",
                    "requests_profiled",
                    "handovers",
                )
            ]
            for engine in ("b", "a")
        )
        for subject in (*own, SUBJECTS.kv_events, SUBJECTS.kv_metrics, "$KV.roost-claims.engine.b"):
            assert await hostile.may_publish(subject, b"x"), subject
        for subject in (
            *other,
            "$KV.roost-claims.engine.a",
            SUBJECTS.leases("a", 1, 0),
            SUBJECTS.handover("a", 1, 0),
            SUBJECTS.handover("b", 1, 0),
        ):
            assert not await hostile.may_publish(subject), subject
        for subject in (
            SUBJECTS.describe_engine("a", 1),
            SUBJECTS.describe_engine("*", "*"),
            SUBJECTS.kv_snapshot("a", 1, 0),
            SUBJECTS.handover("a", 1, 0),
            SUBJECTS.leases("a", 1, 0),
            SUBJECTS.route,
            SUBJECTS.heartbeats(),
            "_INBOX.router.>",
            ">",
        ):
            assert not await hostile.may_listen(subject), subject
        for subject in (
            SUBJECTS.describe_engine("b", "*"),
            SUBJECTS.handover("b", "*", "*"),
            SUBJECTS.clusters,
        ):
            assert await hostile.may_listen(subject), subject


async def test_an_engine_records_no_placements_drains_or_verdicts_and_leaves_leads_and_streams_alone(
    furnished: Server,
) -> None:
    async with furnished.stranger("engine-b") as hostile:
        for subject in (
            SUBJECTS.placements("b"),
            SUBJECTS.migrations("b"),
            SUBJECTS.drains("a", None),
            SUBJECTS.drains("b", 0),
            SUBJECTS.config("router"),
            SUBJECTS.loop,
            SUBJECTS.migrate,
            SUBJECTS.homes,
            SUBJECTS.tables,
            SUBJECTS.reservations,
            "$KV.roost-claims.migration.coordinator",
            "$KV.roost-claims.migration.loop",
            "$KV.roost-claims.handover.b",
            *(
                f"$JS.API.STREAM.{what}.{stream}"
                for what in ("PURGE", "DELETE", "UPDATE")
                for stream in ("roost-stored", "KV_roost-claims", "OBJ_roost-blobs")
            ),
            "_INBOX.router.x",
        ):
            assert not await hostile.may_publish(subject), subject


async def test_an_engine_answers_whoever_asks_it_and_cannot_write_to_other_inboxes(furnished: Server) -> None:
    async def answer(_: Any) -> Any:
        return RequestRefused(reason="answered")

    async with furnished.bus("engine-a") as engine, furnished.bus("router") as router:
        async with engine.serve(SUBJECTS.describe_engine("a", 1), answer):
            with pytest.raises(BusError, match="answered"):
                await router.request(SUBJECTS.describe_engine("a", 1), DescribeLoop())


async def test_the_claim_of_another_engine_cannot_be_taken(furnished: Server) -> None:
    async with furnished.bus("engine-a") as honest, furnished.bus("engine-b") as hostile:
        claim = ClaimLease(honest, SUBJECTS.claim("a"), worker_id=1, node="n")
        await claim.take()
        seen = await hostile.read_claim(SUBJECTS.claim("a"))
        assert seen is not None
        with pytest.raises(BusError) as caught:
            await hostile.claim(SUBJECTS.claim("a"), b'{"worker_id":2,"node":"evil","beat":1}', seen.revision)
        assert not isinstance(caught.value, ClaimLost)
        assert (await read(honest, SUBJECTS.claim("a"))) == seen.value
        await claim.release()


# The other parts: what they must not


@pytest.mark.parametrize(
    ("user", "forbidden"),
    [
        (
            "router",
            (
                SUBJECTS.membership("a"),
                SUBJECTS.placements("a"),
                SUBJECTS.drains("a", 0),
                SUBJECTS.migrate,
                SUBJECTS.handover("a", 1, 0),
            ),
        ),
        (
            "router",
            (
                "$KV.roost-claims.engine.a",
                "$KV.roost-claims.migration.coordinator",
                "$JS.API.STREAM.PURGE.roost-stored",
                SUBJECTS.kv_events,
            ),
        ),
        (
            "tracker",
            (
                SUBJECTS.membership("a"),
                SUBJECTS.kv_metrics,
                SUBJECTS.homes,
                SUBJECTS.loop,
                SUBJECTS.reservations,
            ),
        ),
        (
            "tracker",
            (
                "$KV.roost-claims.engine.a",
                "$JS.API.STREAM.PURGE.roost-stored",
                "$JS.API.STREAM.DELETE.KV_roost-claims",
            ),
        ),
        (
            "planner",
            (
                SUBJECTS.membership("a"),
                SUBJECTS.kv_metrics,
                SUBJECTS.drains("a", 0),
                SUBJECTS.reservations,
                SUBJECTS.tables,
                SUBJECTS.loop,
            ),
        ),
        (
            "planner",
            (
                "$KV.roost-claims.engine.a",
                "$JS.API.STREAM.PURGE.roost-stored",
                "$JS.API.STREAM.DELETE.roost-stored",
            ),
        ),
        (
            "operator",
            (
                SUBJECTS.membership("a"),
                SUBJECTS.heartbeats("a"),
                SUBJECTS.kv_metrics,
                SUBJECTS.placements("a"),
                SUBJECTS.homes,
            ),
        ),
    ],
)
async def test_what_is_not_a_parts_own_is_refused(
    furnished: Server, user: str, forbidden: tuple[str, ...]
) -> None:
    async with furnished.stranger(user) as part:
        for subject in (
            *forbidden,
            "namespace.other.component.router.route",
            "anything",
            "$SYS.REQ.SERVER.PING",
        ):
            assert not await part.may_publish(subject), subject
        assert not await part.may_listen(">")
        assert not await part.may_listen(f"_INBOX.{'router' if user != 'router' else 'planner'}.>")


async def test_a_refusal_is_an_error_with_its_cause_wherever_the_bus_is_used(furnished: Server) -> None:
    async with furnished.bus("tracker") as bus:
        with pytest.raises(BusError, match=r"user 'tracker' may not publish on .*membership\.a"):
            await bus.record(SUBJECTS.membership("a"), left("a"))
        with pytest.raises(BusError, match=r"user 'tracker' may not listen to .*kv_metrics"):
            async with bus.subscribe(SUBJECTS.kv_metrics):
                pass
        await bus.publisher(SUBJECTS.kv_metrics).publish(
            KvMetrics(worker_id=1)
        )  # telemetry: dropped, and the log says why
    async with furnished.bus("operator") as operator:
        await operator.record(
            SUBJECTS.drains("a", 0), RankDrained(engine="a", worker_id=1, rank=0, draining=True)
        )


async def test_every_role_has_a_login_of_its_own_that_only_its_owner_reads(server: Server) -> None:
    files = sorted(server.credentials.folder.glob("*.json"))
    assert sorted(file.stem for file in files) == sorted([*ROLES, "engine-a", "engine-b"])
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert len({json.loads(file.read_text())["password"] for file in files}) == len(files)
    assert all(len(json.loads(file.read_text())["password"]) >= 43 for file in files)


async def test_another_user_cannot_make_the_log_anew_with_other_rules(furnished: Server) -> None:
    async with furnished.stranger("engine-b") as hostile:
        with pytest.raises(nats.errors.Error):
            await hostile.client.jetstream(timeout=1).add_stream(
                api.StreamConfig(name="roost-stored", subjects=["elsewhere"], max_msgs=1)
            )
    async with furnished.bus("planner") as bus:
        assert [one async for one in bus.replay(SUBJECTS.migrations(), follow=False)] != []


# Large answers come in parts: each is an answer to a request of its own


@pytest.mark.parametrize(
    ("server_user", "asker", "subject"),
    [
        ("engine-a", "router", SUBJECTS.kv_snapshot("a", 1, 0)),
        ("tracker", "router", SUBJECTS.describe_profile),
        ("planner", "operator", SUBJECTS.describe_plan),
        ("planner", "router", SUBJECTS.describe_plan),
        ("planner", "router", SUBJECTS.loop),
    ],
)
async def test_large_answers_flow_within_the_rights_of_each_role(
    furnished: Server, server_user: str, asker: str, subject: str
) -> None:
    async def answer(_: Message) -> Message:
        return large

    large = EngineLeft(engine="a", worker_id=1, reason="x" * 3_000_000)
    async with (
        furnished.bus(server_user) as server,
        furnished.bus(asker) as client,
        server.serve(subject, answer),
    ):
        assert await client.request(subject, RequestRefused(reason="of any kind"), 10.0) == large


@pytest.mark.parametrize("user", ["router", "tracker", "planner", "operator", "engine-a"])
async def test_every_role_sees_how_full_the_stores_are(furnished: Server, user: str) -> None:
    async with furnished.bus(user) as bus:
        assert {one.store for one in await bus.stores()} == {"log", "claims", "blobs", "parcels"}
