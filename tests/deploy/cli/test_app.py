"""The command line: help, exit codes, and errors without tracebacks."""

import json
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.commands import roost

COMMANDS = (
    "up",
    "router",
    "tracker",
    "planner",
    "worker",
    "status",
    "placement",
    "popularity",
    "plan",
    "migrate",
    "layout",
    "migration",
    "rollback",
    "top",
    "explain",
    "events",
    "drain",
    "reload",
    "key",
    "bus",
    "config",
    "doctor",
)


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def refused(status: int, *arguments: str) -> str:
    """What a command that cannot work says on standard error."""
    result = roost(*arguments)
    assert result.exit_code == status, result.output
    return result.stderr


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that nobody listens on, held so that nobody gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = roost(command, "--help")
    assert result.exit_code == 0
    assert f"roost {command}" in result.output.replace("root ", "roost ")
    assert command in roost("--help").output


@pytest.mark.parametrize(
    ("command", "section"),
    [
        ("status", "[backends.NAME]"),
        ("drain", "or [backends.NAME]"),
        ("key new", "[router] default_class"),
        ("bus permissions", "[bus]"),
        ("bus credentials", "[bus]"),
    ],
)
def test_a_section_of_the_settings_that_help_names_is_shown(command: str, section: str) -> None:
    assert section in roost(*command.split(), "--help").output


def test_the_version_is_printed() -> None:
    shown = roost("--version")
    assert shown.exit_code == 0
    assert "solvers: " in shown.output
    assert "decisions: " in shown.output
    assert "embedded engine: " in shown.output


def test_the_effective_configuration_is_printed_with_sources_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roost.toml").write_text("[router]\nport = 8123\n")
    monkeypatch.setenv("ROOST_UP_ENGINES", "3")
    printed = roost("config").output
    assert f"port = 8123  # {tmp_path / 'roost.toml'}:2" in printed
    assert "engines = 3  # ROOST_UP_ENGINES" in printed
    assert tomllib.loads(printed)["engine"]["ranks"] == 2
    assert json.loads(roost("config", "--json").output)["router"]["port"] == {
        "value": 8123,
        "source": f"{tmp_path / 'roost.toml'}:2",
    }


@pytest.mark.parametrize("command", ["config", "up", "tracker", "status", "explain"])
def test_a_bad_configuration_is_a_usage_error_of_every_command(command: str, tmp_path: Path) -> None:
    (tmp_path / "roost.toml").write_text("[router]\nprot = 1\n")
    arguments = [command, "hello"] if command == "explain" else [command]
    assert "roost.toml:2: no key 'prot' in [router]; did you mean port?" in refused(2, *arguments)


def test_a_bad_value_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert "--engines must be a whole number from 0 to 64, not 65" in refused(2, "up", "--engines", "65")
    assert "name an existing folder" in refused(2, "up", "--model", "/no/such/model")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain"], 'roost explain "prompt", or roost explain --id ID'),
        (["explain", "hello", "--id", "1"], "or roost explain --id"),
        (["worker", "--engine", "openai"], "--engine openai needs one --url"),
        (["worker", "--engine", "openai", "--url", "server:80"], "must start with http:// or https://"),
        (["worker", "--url", "http://a"], "--url belongs to --engine openai"),
        (["worker", "--engine", "openai", "--url", "http://a", "--url", "http://b"], "needs one --url"),
        (["worker", "--engine", "vllm"], "--engine vllm needs --url"),
        (["worker", "--engine", "vllm", "--url", "server:80"], "must start with http:// or https://"),
        (["worker", "--engine", "vllm", "--url", "http://a", "--listen", "x"], "must be HOST:PORT"),
        (["worker", "--engine", "vllm", "--url", "http://a", "--listen", "0.0.0.0:1"], "without encryption"),
        (["worker", "--engine", "vllm", "--ranks", "2"], "--ranks is of no use with --engine vllm"),
        (["worker", "--listen", "a:1"], "--listen belongs to --engine vllm"),
        (["worker", "--host", "0.0.0.0"], "host must be an address under which routers reach this machine"),
        (["worker", "--name", "two words"], "engine name 'two words'"),
        (
            ["events", "--kind", "Nonsense"],
            "no kind 'Nonsense'; kinds: migration, membership, loop, handover, EngineJoined",
        ),
        (
            ["events", "--kind", "MigrationComitted"],
            "no kind 'MigrationComitted'; did you mean MigrationCommitted",
        ),
        (["events", "--kind", "handover", "--since", "1h"], "is telemetry and is not stored"),
        (["migrate"], "roost migrate --expert LAYER/EXPERT --to ENGINE/RANK, roost migrate --plan FILE"),
        (["migrate", "--expert", "3", "--to", "e0/1"], "--expert '3': name it as LAYER/EXPERT, e.g. 3/17"),
        (["migrate", "--expert", "3/17", "--to", "e0"], "--to 'e0': name it as ENGINE/RANK, e.g. engine-0/1"),
        (
            ["migrate", "--expert", "3/17", "--to", "e0/1", "--move", "--swap", "4"],
            "--swap already moves both experts",
        ),
        (["migrate", "--plan", "x.json", "--expert", "3/17"], "--expert moves one expert"),
        (["migrate", "--plan", "x.json"], "x.json: no plan can be read from it"),
        (["plan", "--apply", "--dead", "1"], "a plan needs live ranks"),
        (["events", "--since", "1h", "--kind", "kvmetrics"], "KvMetrics is telemetry and is not stored"),
        (["events", "--since", "soon"], "use a number and s, m, h or d"),
        (
            ["events", "--kind", "kv"],
            "'kv' is the beginning of KvSnapshotRequested, KvSnapshot, KvEvents, KvMetrics: name one of them",
        ),
        (["events", "--no-follow"], "--no-follow needs --since"),
        (["drain", "e0", "--undo", "--wait", "3"], "--undo takes neither --wait nor --reason"),
        (["drain"], "Missing argument"),
        (["router", "--backend", "ftp://a"], "'ftp://a' must start with http"),
        (["config", "--config", "missing.toml"], "cannot read missing.toml"),
    ],
)
def test_misuse_is_a_usage_error_with_the_remedy(arguments: list[str], says: str) -> None:
    assert says in refused(2, *arguments)


def test_unknown_options_and_commands_are_usage_errors() -> None:
    assert "--nonsense" in refused(2, "up", "--nonsense")
    assert "nonsense" in refused(2, "nonsense")


@pytest.mark.parametrize(
    "command",
    [["status"], ["migration", "pause"], ["placement"], ["events"], ["tracker"], ["planner"], ["worker"]],
)
def test_without_nats_a_command_fails_with_address_and_remedy(
    command: list[str], unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOST_BUS_CONNECT_SECONDS", "0.3")
    said = refused(1, *command, "--nats", f"nats://127.0.0.1:{unused_port}")
    assert f"127.0.0.1:{unused_port}" in said


def test_without_a_router_explain_fails_with_address_and_remedy(unused_port: int) -> None:
    said = refused(1, "explain", "hello", "--router", f"http://127.0.0.1:{unused_port}")
    assert (
        f"no router at http://127.0.0.1:{unused_port}: Connection refused; name it with --router URL" in said
    )


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in ("up", "router"):
            said = refused(
                1,
                command,
                "--port",
                port,
                *(["--backend", "http://127.0.0.1:1"] if command == "router" else []),
            )
            assert (
                f"cannot listen on 127.0.0.1:{port}: Address already in use; is another server there? Choose"
                " another with --port" in said
            )
    assert not (tmp_path / "state").exists()


def test_tracing_variables_that_cannot_work_are_usage_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    assert "'zipkin' is not known; use otlp, console or none" in refused(2, "up", "--port", "0")


def test_reload_without_a_running_fleet_says_what_to_do() -> None:
    assert "kill -HUP PID" in refused(1, "reload")
    assert "no fleet of this user runs here" in refused(1, "config", "--running")


@pytest.mark.parametrize(
    ("kind", "remark"),
    [
        ("config", ""),
        ("PlanJudged", "roost: PlanJudged is now PlanEvaluated"),
        ("planjudged", "roost: PlanJudged is now PlanEvaluated"),
    ],
)
def test_the_beginning_of_a_kind_or_its_former_name_is_enough(
    kind: str, remark: str, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOST_BUS_CONNECT_SECONDS", "0.3")
    replay = ["events", "--kind", kind, "--since", "1h", "--no-follow"]
    stderr = refused(1, *replay, "--nats", f"nats://127.0.0.1:{unused_port}")
    assert f"127.0.0.1:{unused_port}" in stderr
    assert stderr.startswith(remark)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ([], "start Dynamo's frontends with --migration-limit 0"),
        (["3"], "would continue broken answers themselves"),
    ],
)
def test_a_router_in_dynamo_starts_only_if_frontends_continue_nothing(
    limit: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYN_MIGRATION_LIMIT", raising=False)
    option = ["--frontend-migration-limit", *limit] if limit else []
    assert reason in " ".join(refused(2, "router", "--dynamo", "workers", *option).split())


def test_a_router_in_dynamo_sees_the_limit_in_dynamos_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "2")
    said = refused(2, "router", "--dynamo", "workers")
    assert "would continue broken answers themselves" in " ".join(said.split())


def test_a_router_in_dynamo_is_one_process() -> None:
    said = refused(2, "router", "--dynamo", "workers", "--frontend-migration-limit", "0", "--processes", "2")
    assert "start several routers instead of --processes" in " ".join(said.split())


def test_a_router_does_not_share_a_namespace_with_dynamos_workers() -> None:
    said = refused(2, "router", "--dynamo", "roost", "--frontend-migration-limit", "0")
    assert "choose another namespace" in " ".join(said.split())


@pytest.mark.parametrize("address", ["9002", "somewhere:", "127.0.0.1:port"])
def test_the_address_of_an_endpoint_picker_has_a_host_and_a_port(address: str) -> None:
    said = " ".join(refused(2, "router", "--backend", "http://127.0.0.1:1", "--gateway", address).split())
    assert address in said
    assert "must be HOST:PORT" in said


def test_an_endpoint_picker_for_other_machines_needs_keys_and_tls() -> None:
    said = " ".join(
        refused(2, "router", "--backend", "http://127.0.0.1:1", "--gateway", "0.0.0.0:9002").split()
    )
    assert "endpoint picker would listen on '0.0.0.0'" in said
