"""Doors on addresses that other machines reach: what they need, and what a command says that was given
less."""

import hashlib
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.sections import WorkerConfig
from deploy.security.exposure import is_loopback, missing_at_ranks, missing_at_router, missing_in_dynamo
from router.config import RouterConfig
from tests.deploy.commands import roost

FILE = Path("some-file")
PAIR = {"tls_cert": FILE, "tls_key": FILE}


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.7", False),
        ("", False),
    ],
)
def test_an_address_is_of_this_machine_alone_or_not(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


def test_a_name_counts_by_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*found: str) -> Callable[..., list[tuple[int, int, int, str, tuple[str, int]]]]:
        return lambda *_, **__: [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", addresses("127.0.0.1", "10.0.0.7"))
    assert not is_loopback("both.example")
    monkeypatch.setattr(socket, "getaddrinfo", addresses("127.0.0.1"))
    assert is_loopback("own.example")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ("client keys (--client-keys FILE", "TLS ([router] tls_cert and tls_key")),
        ({"api_key_file": FILE}, ("TLS ([router]",)),
        ({"tls_terminated": True}, ("client keys",)),
        (PAIR, ("client keys",)),
    ],
)
def test_a_router_for_other_machines_says_what_it_lacks(
    settings: dict[str, object], words: tuple[str, ...]
) -> None:
    complaint = missing_at_router(RouterConfig(host="0.0.0.0", **settings))  # type: ignore[arg-type]
    assert complaint is not None
    assert complaint.startswith("the router would listen on '0.0.0.0'")
    assert all(word in complaint for word in words)
    assert ("TLS" in complaint) == any("TLS" in word for word in words)


@pytest.mark.parametrize("settings", [{"tls_terminated": True}, PAIR])
def test_keys_or_secret_and_tls_are_enough(settings: dict[str, object]) -> None:
    assert missing_at_router(RouterConfig(host="0.0.0.0", api_key_file=FILE, **settings)) is None  # type: ignore[arg-type]
    assert missing_at_ranks(WorkerConfig(host="10.0.0.7", fleet_secret_file=FILE, **settings)) is None  # type: ignore[arg-type]


def test_ranks_for_other_machines_need_the_secret_and_tls() -> None:
    assert missing_at_ranks(WorkerConfig()) is None
    complaint = missing_at_ranks(WorkerConfig(host="10.0.0.7"))
    assert complaint is not None
    assert "fleet_secret_file" in complaint
    assert "TLS ([worker] tls_cert" in complaint
    made = missing_at_ranks(WorkerConfig(host="10.0.0.7"), secret_is_made=True)
    assert made is not None
    assert "fleet_secret_file" not in made


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("router", "--host", "0.0.0.0", "--backend", "http://127.0.0.1:1"), "without client keys"),
        (("router", "--host", "::", "--processes", "2"), "without client keys"),
        (("router", "--host", "0.0.0.0", "--tls-terminated"), "without client keys"),
        (("up", "--host", "0.0.0.0"), "without client keys"),
        (("worker", "--host", "10.0.0.7"), "without the fleet's secret"),
        (("router", "--tls-cert", "cert.pem"), "tls_cert and tls_key belong together"),
        (("worker", "--tls-key", "key.pem"), "tls_cert and tls_key belong together"),
    ],
)
def test_a_command_refuses_to_open_such_a_door_and_names_the_remedy(
    arguments: tuple[str, ...], complaint: str
) -> None:
    result = roost(*arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert ("--insecure" in result.output) == ("without" in complaint)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("command", ["router", "up"])
def test_a_keys_file_of_an_older_version_ends_the_command_at_once_with_the_line_to_put(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("key-in-clear\n")
    result = roost(command, "--client-keys", str(tmp_path / "keys"))
    assert result.exit_code == 2
    assert "line 1 holds a key in clear; put this line instead" in result.output
    digest = hashlib.sha256(b"key-in-clear").hexdigest()
    assert f"sha256:{digest} default infer,route" in result.output
    assert "key-in-clear" not in result.output


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("arguments", "variable", "complaint"),
    [
        (("router",), "ROOST_ROUTER_FLEET_SECRET_FILE", "secret 1 must be"),
        (("worker",), "ROOST_WORKER_FLEET_SECRET_FILE", "secret 1 must be"),
        (("router", "--tls-cert", "short", "--tls-key", "short"), "ROOST_UP_LOG_LEVEL", "cannot be used"),
        (("worker", "--tls-cert", "short", "--tls-key", "short"), "ROOST_UP_LOG_LEVEL", "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_end_the_command_at_once(
    arguments: tuple[str, ...], variable: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_text("short")
    monkeypatch.setenv(variable, "info" if "LOG" in variable else str(tmp_path / "short"))
    result = roost(*arguments)
    assert (result.exit_code, complaint in result.output) == (2, True), result.output


def test_dynamos_runtime_listens_for_other_machines_only_if_told_so() -> None:
    worker, here = WorkerConfig(dynamo="prod"), "127.0.0.1"
    complaint = missing_in_dynamo(worker, {})
    assert complaint is not None
    assert "set DYN_TCP_RPC_HOST and DYN_EVENT_PLANE_HOST to 127.0.0.1" in complaint
    assert "--tls-terminated" in complaint
    events = missing_in_dynamo(worker, {"DYN_TCP_RPC_HOST": here, "DYN_EVENT_PLANE_HOST": "0.0.0.0"})
    assert events is not None
    assert "set DYN_EVENT_PLANE_HOST to" in events
    assert missing_in_dynamo(worker, {"DYN_TCP_RPC_HOST": here, "DYN_EVENT_PLANE_HOST": here}) is None
    assert missing_in_dynamo(worker, {"DYN_TCP_RPC_HOST": here, "DYN_EVENT_PLANE": "nats"}) is None
    assert missing_in_dynamo(WorkerConfig(dynamo="prod", tls_terminated=True), {}) is None
    assert missing_in_dynamo(WorkerConfig(), {}) is None


@pytest.mark.skipif(find_spec("dynamo") is None, reason="needs the extra dynamo")
def test_a_worker_in_dynamo_says_what_its_address_lacks(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE"):
        monkeypatch.delenv(variable, raising=False)
    result = roost("worker", "--engine", "simulated", "--dynamo", "prod")
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "DYN_TCP_RPC_HOST" in said
    assert "--insecure does so all the same" in said
