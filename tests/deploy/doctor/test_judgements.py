"""Judgements of the doctor: for each thing that can be wrong, one finding that names it and its remedy."""

from dataclasses import replace

import pytest

from bus import StoreUse
from bus.nats.server_report import ServerReport, UserRights
from bus.protocol.permissions import rights
from bus.protocol.roles import ROLES
from bus.protocol.subjects import Subjects
from deploy.doctor import judgements as judge
from deploy.doctor.judgements import DeploymentFinding, DoorReport, SecretFile, SpaceReport

NOW, DAY = 1_000_000.0, 86400.0
SUBJECTS = Subjects()
WELL = ServerReport("2.12.1", jetstream=True, tls=True, logins=True, clock_offset=0.1, certificate_ends=None)
DOOR = DoorReport("e/0", "https://h:1", 200, certificate_ends=NOW + 90 * DAY)


def only(found: list[DeploymentFinding], check: str, *words: str) -> None:
    assert [one.check for one in found] == [check]
    for word in words:
        assert word in found[0].what
    assert found[0].remedy


def test_a_deployment_in_order_has_no_findings() -> None:
    assert judge.judge_server("s", WELL, NOW) == []
    assert judge.judge_stores([StoreUse("log", 99, 100, refuses=False)]) == []
    assert judge.judge_parts(planner=True, tracker=True, router=True, engines=1) == []
    assert judge.judge_silence(["a"], ["a", "b"], 2.5) == []
    assert judge.judge_clocks({"a": 0.5, "b": -1.5}) == []
    assert judge.judge_messages({"kind": 0, "payload": 0}) == []
    assert judge.judge_door(DOOR, NOW) == []
    assert judge.judge_space(SpaceReport("disk", "/", 2 << 30, 1 << 45)) == []
    assert judge.judge_descriptors(65_536) == []
    assert judge.judge_secret(SecretFile("/k", 0o600)) == []


def test_an_old_server_one_without_jetstream_and_one_with_a_wrong_clock_are_named() -> None:
    only(judge.judge_server("s", replace(WELL, version="2.9.25"), NOW), "versions", "2.9.25")
    only(judge.judge_server("s", replace(WELL, version=""), NOW), "versions", "unknown")
    only(judge.judge_server("s", replace(WELL, jetstream=False), NOW), "jetstream", "no JetStream")
    only(judge.judge_server("s", replace(WELL, clock_offset=-60.0), NOW), "clocks", "60 s behind")


@pytest.mark.parametrize("role", ROLES)
def test_a_user_with_the_rights_of_its_role_is_in_order_and_each_missing_one_is_found(role: str) -> None:
    wanted = rights(role, SUBJECTS)  # type: ignore[arg-type]
    report = replace(
        WELL, user=role, publish=UserRights(wanted.publish), subscribe=UserRights(wanted.subscribe)
    )

    def found(report: ServerReport) -> list[DeploymentFinding]:
        return judge.judge_rights(role, report, role, SUBJECTS, "*")  # type: ignore[arg-type]

    assert found(report) == []
    assert found(replace(report, publish=UserRights(), subscribe=UserRights((">",)))) == []
    for gone in wanted.publish:
        allowed = tuple(one for one in wanted.publish if one != gone)
        left = found(replace(report, publish=UserRights(allowed)))
        assert left == [] or gone in left[0].what  # another pattern of the role may cover it
        only(found(replace(report, publish=UserRights(None, (gone,)))), "rights", gone, "publish on")
    only(found(replace(report, subscribe=UserRights(()))), "rights", "listen to")
    only(found(replace(report, publish=None, subscribe=None)), "rights", "cannot be read")


def test_names_of_users_lead_to_their_roles() -> None:
    assert judge.role_of("planner") == ("planner", "*")
    assert judge.role_of("engine-north") == ("engine", "north")
    assert judge.role_of("grafana") is None


def test_full_stores_that_refuse_are_found() -> None:
    only(judge.judge_stores([StoreUse("blobs", 95, 100, refuses=True)]), "jetstream", "blobs", "95")


def test_missing_parts_are_problems_only_where_nothing_works_without_them() -> None:
    found = judge.judge_parts(planner=False, tracker=False, router=False, engines=0)
    assert [(one.level, one.what.split()[1]) for one in found] == [
        ("problem", "router"),
        ("problem", "engine"),
        ("note", "planner"),
        ("note", "tracker"),
    ]


def test_an_engine_without_heartbeats_is_found() -> None:
    only(judge.judge_silence(["a", "b"], ["b"], 2.5), "engines", "engine a", "2.5 s")


def test_wrong_clocks_are_found_and_a_machine_that_differs_from_all_suspects_itself() -> None:
    only(judge.judge_clocks({"engine a": 30.0, "engine b": 0.0}), "clocks", "engine a", "30 s ahead")
    found = judge.judge_clocks({"engine a": -30.0, "engine b": -31.0})
    assert len(found) == 2
    assert all("this one is probably wrong" in one.what for one in found)


def test_messages_of_other_versions_are_found() -> None:
    only(judge.judge_messages({"kind": 3, "payload": 0}), "versions", "3 messages", "a part is newer")
    only(judge.judge_messages({"kind": 0, "payload": 1, "envelope": 1}), "versions", "2 messages")


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"status": None, "error": "refused"}, "doors", "does not answer: refused"),
        ({"status": None, "error": "expired", "untrusted": True}, "tls", "cannot be verified: expired"),
        ({"is_other_program": True}, "ports", "another program"),
        ({"status": 503}, "doors", "with 503"),
        ({"seconds": 4.0}, "doors", "took 4 s"),
        ({"certificate_ends": NOW + 3 * DAY}, "tls", "ends in 3.0 days"),
        ({"certificate_ends": NOW - 3 * DAY}, "tls", "ended 3.0 days ago"),
    ],
)
def test_each_fault_of_an_http_server_is_found(changes: dict[str, object], check: str, words: str) -> None:
    only(judge.judge_door(replace(DOOR, **changes), NOW), check, words)  # type: ignore[arg-type]


def test_a_server_that_asks_for_a_key_is_well() -> None:
    assert judge.judge_door(replace(DOOR, status=401), NOW) == []


def test_want_of_room_of_descriptors_and_of_secrecy_is_found() -> None:
    only(judge.judge_space(SpaceReport("disk", "/var", 5_000_000, 1 << 40)), "space", "/var", "5 MB")
    only(judge.judge_space(SpaceReport("shared memory", "/dev/shm", 0, 64 << 20)), "space", "/dev/shm")
    only(judge.judge_descriptors(1024), "descriptors", "1024")
    only(judge.judge_secret(SecretFile("/etc/key", 0o644)), "secrets", "/etc/key", "644")
