"""Credentials, TLS, several servers and replicas, against real NATS servers."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bus import BusError
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.engines import EngineLeft

CONFIG = BusConfig(connect_seconds=2.0, request_seconds=1.0, record_seconds=3.0, reconnect_max_seconds=0.2)
USERS = 'jetstream: enabled\nauthorization { users: [ { user: "me", password: "%s" } ] }\n'


def credentials(folder: Path, **login: str) -> Path:
    file = folder / "login.json"
    file.write_text(json.dumps(login))
    return file


@pytest.fixture
def server_of(tmp_path: Path, nats_server: Any) -> Iterator[Any]:
    """Start additional servers with their own configuration."""
    started: list[Any] = []

    def start(text: str, name: str = "other") -> Any:
        file = tmp_path / f"{name}.conf"
        file.write_text(text)
        server = type(nats_server)(tmp_path / name, "-c", str(file))
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


async def works(servers: Any, config: BusConfig) -> bool:
    """Return True if a recorded message can be replayed."""
    subjects = Subjects("login")
    bus = await NatsBus.connect(servers, subjects, config)
    try:
        await bus.record(subjects.membership("e"), EngineLeft(engine="e", worker_id=1, reason=""))
        return [one.message async for one in bus.replay(subjects.membership(), follow=False)] != []
    finally:
        await bus.close()


async def test_the_login_of_a_file_is_used_and_a_wrong_one_is_named_as_the_cause(
    tmp_path: Path, server_of: Any
) -> None:
    server = server_of(USERS % "right")
    assert await works(
        server.url, replace(CONFIG, credentials_file=credentials(tmp_path, user="me", password="right"))
    )
    for config in (
        CONFIG,
        replace(CONFIG, credentials_file=credentials(tmp_path, user="me", password="wr0ng")),
    ):
        with pytest.raises(BusError, match=r"refuses this user .*bus\.credentials_file") as caught:
            await NatsBus.connect(server.url, Subjects(), replace(config, connect_seconds=0.5))
        assert "wr0ng" not in str(caught.value)


async def test_a_changed_secret_is_used_at_the_next_connection_without_a_restart(
    tmp_path: Path, server_of: Any
) -> None:
    server, subjects = server_of(USERS % "first"), Subjects("rotation")
    bus = await NatsBus.connect(
        server.url,
        subjects,
        replace(CONFIG, credentials_file=credentials(tmp_path, user="me", password="first")),
    )
    try:
        (tmp_path / "other.conf").write_text(USERS % "second")
        credentials(tmp_path, user="me", password="second")
        server.stop(signal.SIGKILL)
        await asyncio.to_thread(server.start)
        await bus.record(subjects.membership("e"), EngineLeft(engine="e", worker_id=1, reason=""))
    finally:
        await bus.close()


@pytest.mark.parametrize("text", ["", "me:secret", '{"user": "me"}', "-----BEGIN NATS USER JWT-----\nsecret"])
async def test_a_file_that_holds_no_login_is_refused_with_the_form_it_should_have_and_is_not_quoted(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "login.json").write_text(text)
    with pytest.raises(BusError, match=r'login\.json .*\{"user": "\.\.\.", "password": "\.\.\."\}') as caught:
        await NatsBus.connect(
            "nats://127.0.0.1:1", Subjects(), replace(CONFIG, credentials_file=tmp_path / "login.json")
        )
    assert "secret" not in str(caught.value)
    with pytest.raises(BusError, match=r"missing\.json cannot be read: No such file"):
        await NatsBus.connect(
            "nats://127.0.0.1:1", Subjects(), replace(CONFIG, credentials_file=tmp_path / "missing.json")
        )


def signed(folder: Path, name: str, *, by: str | None = None) -> tuple[Path, Path]:
    """Return a certificate for 127.0.0.1 and its key, made with the openssl program."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    ca = (
        [
            "-CA",
            str(folder / f"{by}.pem"),
            "-CAkey",
            str(folder / f"{by}.key"),
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:bus.example",
        ]
        if by
        else []
    )
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    ]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert), *ca], check=True, capture_output=True)
    return key, cert


async def test_tls_checks_the_server_presents_our_certificate_and_sends_nothing_to_a_server_without(
    tmp_path: Path, server_of: Any, nats_server: Any
) -> None:
    signed(tmp_path, "ca")
    (server_key, server_cert), (key, cert) = (
        signed(tmp_path, "server", by="ca"),
        signed(tmp_path, "client", by="ca"),
    )
    ca = tmp_path / "ca.pem"
    server = server_of(
        USERS % "right"
        + f'tls {{ cert_file: "{server_cert}", key_file: "{server_key}", ca_file: "{ca}", verify: true }}\n'
    )
    login = credentials(tmp_path, user="me", password="right")
    config = replace(CONFIG, credentials_file=login, tls_ca=ca, tls_cert=cert, tls_key=key)
    assert await works(server.url, config)
    assert await works(server.url, replace(config, tls_hostname="bus.example"))
    hasty = replace(config, connect_seconds=0.5)
    for wrong in (
        replace(hasty, tls_hostname="elsewhere"),
        replace(hasty, tls_ca=None, tls_hostname="bus.example"),
        replace(hasty, tls_cert=None, tls_key=None),
    ):
        with pytest.raises(BusError, match="no NATS server at"):
            await NatsBus.connect(server.url, Subjects(), wrong)
    with pytest.raises(BusError, match="does not ask for TLS"):
        await NatsBus.connect(nats_server.url, Subjects(), hasty)


async def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "nonsense.pem").write_text("nonsense")
    for fields, named in (
        ({"tls_ca": tmp_path / "nonsense.pem"}, r"bus\.tls_ca .*nonsense\.pem cannot be used"),
        (
            {"tls_cert": tmp_path / "nonsense.pem", "tls_key": tmp_path / "missing"},
            r"bus\.tls_cert .*nonsense\.pem .* cannot be used",
        ),
    ):
        with pytest.raises(BusError, match=named):
            await NatsBus.connect("nats://127.0.0.1:1", Subjects(), replace(CONFIG, **fields))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tls_cert and tls_key belong together"):
        BusConfig(tls_key=tmp_path / "key")


async def test_a_server_of_the_list_that_is_away_does_not_keep_us_from_the_others(nats_server: Any) -> None:
    for servers in (["nats://127.0.0.1:1", nats_server.url], [nats_server.url, "nats://127.0.0.1:1"]):
        assert await works(servers, CONFIG)


async def test_more_replicas_than_the_cluster_has_servers_are_refused_with_the_remedy(
    nats_server: Any,
) -> None:
    with pytest.raises(
        BusError, match=r"few-stored cannot be kept 3 times .*start more of them, or lower bus\.replicas"
    ):
        await NatsBus.connect(nats_server.url, Subjects("few"), replace(CONFIG, replicas=3))


async def test_streams_made_with_fewer_replicas_are_used_and_the_operator_is_told_how_to_raise_them(
    nats_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert await works(nats_server.url, CONFIG)
    assert await works(nats_server.url, replace(CONFIG, replicas=3))
    for stream in ("login-stored", "KV_login-claims", "OBJ_login-blobs", "OBJ_login-parcels"):
        assert caplog.text.count(f"nats stream edit {stream} --replicas 3") == 1


@pytest.mark.slow
async def test_with_three_replicas_log_and_claims_survive_the_loss_of_any_one_server(
    tmp_path: Path, server_of: Any, nats_server: Any
) -> None:
    routes = [type(nats_server)(tmp_path).port for _ in range(3)]
    listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    servers = [
        server_of(
            f'server_name: s{number}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{listed}]'
            " }\njetstream: enabled\n",
            f"s{number}",
        )
        for number, port in enumerate(routes)
    ]
    subjects, urls = Subjects("cluster"), [server.url for server in servers]
    config = replace(CONFIG, replicas=3, connect_seconds=20.0, record_seconds=20.0, request_seconds=5.0)
    bus = await NatsBus.connect(urls, subjects, config)
    try:
        revision = await bus.claim("engine.e", b"1", None)
        for number, server in enumerate(servers):
            await bus.record(subjects.membership("e"), EngineLeft(engine="e", worker_id=number, reason=""))
            server.stop(signal.SIGKILL)
            await bus.record(
                subjects.membership("e"), EngineLeft(engine="e", worker_id=10 + number, reason="")
            )
            held = await bus.read_claim("engine.e")
            assert held is not None
            assert held.revision == revision
            await asyncio.to_thread(server.start)
        said = [
            one.message.worker_id
            async for one in bus.replay(subjects.membership(), follow=False)
            if isinstance(one.message, EngineLeft)
        ]
        assert said == [0, 10, 1, 11, 2, 12]
    finally:
        await bus.close()
