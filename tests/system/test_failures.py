"""What breaks while serving, and what a client sees of it: nothing."""

import asyncio
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import nats
import psutil
import pytest

from bus.protocol.subjects import Subjects
from tests.system.fleets import Fleet, Home, until

STORY = "Tell me a long story about a computer that learns to cook."
TOKENS = 160
BEFORE = 20
"""pieces a client has seen before something breaks"""
VICTIMS = ["the rank that serves", "its peer"]
pytestmark = pytest.mark.slow


@pytest.fixture
def whole(pair: Fleet) -> Fleet:
    """Both engines serve."""
    until(lambda: pair.serving(2, 2), "four ranks to serve", 60)
    return pair


def broken_stream(fleet: Fleet, breaks: Callable[[str, int], None]) -> tuple[str, str]:
    """A stream during which `breaks(engine, rank)` is called with where it is served: the text, and the
    decision's id."""
    with fleet.stream(STORY, max_tokens=TOKENS) as stream:
        engine, rank = fleet.decision(stream.decision_id)["chosen"].split("/")
        pieces: list[str] = []
        for piece in stream.pieces():
            pieces.append(piece)
            if len(pieces) == BEFORE:
                breaks(engine, int(rank))
        assert (stream.roles, stream.finish, len(stream.ids)) == (1, "length", 1)
    return "".join(pieces), stream.decision_id


def retries(fleet: Fleet, decision_id: str) -> int:
    """How often the router went on elsewhere, by its log."""

    def line() -> dict[str, int] | None:
        lines = [
            json.loads(text)
            for text in fleet.log_of("router").read_text().splitlines()
            if decision_id in text and text.startswith("{")
        ]
        return lines[0] if lines else None

    return int(until(line, "the request's log line", 5)["retries"])


def starts(fleet: Fleet, engine: str) -> int:
    """How often the engine began to serve, by its log."""
    return fleet.log_of(f"{engine}-0").read_text().count(" serves on ")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_rank_breaks_no_stream_and_its_engine_comes_back_as_a_new_incarnation(
    whole: Fleet, victim: str
) -> None:
    unbroken, before = whole.text(STORY, max_tokens=TOKENS), whole.status()
    lives = {name: starts(whole, name) for name in before}
    lost: list[str] = []

    def kill(engine: str, rank: int) -> None:
        lost.append(engine)
        whole.processes()[f"{engine}/{rank if victim == VICTIMS[0] else 1 - rank}"].send_signal(
            signal.SIGKILL
        )

    text, decision_id = broken_stream(whole, kill)
    assert text == unbroken
    assert retries(whole, decision_id) == 1
    until(
        lambda: not whole.serving(2, 2) or starts(whole, lost[0]) > lives[lost[0]],
        "the loss to be noticed",
        10,
    )
    until(lambda: whole.serving(2, 2), "four ranks to serve again", 60)
    after = whole.status()
    for name, engine in after.items():
        assert (engine["worker_id"] != before[name]["worker_id"]) == (name in lost)
        assert (
            [rank["url"] for rank in engine["ranks"]] != [rank["url"] for rank in before[name]["ranks"]]
        ) == (name in lost)


def test_the_only_engine_restarts_and_answers_what_had_not_begun(fleet: Fleet) -> None:
    def all_wait() -> bool:
        return "roost_router_requests_in_flight 6.0" in fleet.http.get("/metrics").text

    before = fleet.status()["engine-0"]["worker_id"]
    with ThreadPoolExecutor(6) as clients:
        answers = [clients.submit(fleet.text, f"{STORY} {number}", max_tokens=TOKENS) for number in range(6)]
        until(all_wait, "six requests to be in flight", 5)
        fleet.processes()["engine-0/1"].send_signal(signal.SIGKILL)
        assert all(answer.result() for answer in answers)
    assert fleet.status()["engine-0"]["worker_id"] != before


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_stopped_rank_is_noticed_and_breaks_no_stream(whole: Fleet, victim: str) -> None:
    unbroken = whole.text(STORY, max_tokens=TOKENS)
    stopped = []

    def freeze(engine: str, rank: int) -> None:
        process = whole.processes()[f"{engine}/{1 - rank if victim == VICTIMS[1] else rank}"]
        process.send_signal(signal.SIGSTOP)
        stopped.append(process)

    text, decision_id = broken_stream(whole, freeze)
    assert text == unbroken
    assert retries(whole, decision_id) == 1
    until(lambda: not stopped[0].is_running(), "the frozen rank to be ended", 15)


def test_many_streams_survive_a_killed_engine(whole: Fleet) -> None:
    prompts = [f"Count the stars of constellation {number}." for number in range(8)]
    unbroken = [whole.text(prompt, max_tokens=150) for prompt in prompts]
    victim = whole.processes()["engine-0/0"]

    def streamed(prompt: str) -> str:
        with whole.stream(prompt, max_tokens=150) as stream:
            return "".join(stream.pieces())

    with ThreadPoolExecutor(len(prompts)) as threads:
        futures = [threads.submit(streamed, prompt) for prompt in prompts]
        until(
            lambda: (
                any(load["running"] for load in whole.status()["engine-0"]["ranks"])
                or all(future.done() for future in futures)
            ),
            "running streams",
            20,
        )
        victim.send_signal(signal.SIGKILL)
        assert [future.result() for future in futures] == unbroken


def test_nats_restarted_while_serving_loses_nothing_that_was_promised(fleet: Fleet) -> None:
    def stored(event: str) -> list[str]:
        lines = fleet.home.output("events", "--since", "1h", "--no-follow", "--json").splitlines()
        return [line for line in lines if event in line]

    joins, leaves = stored("EngineJoined"), stored("EngineLeft")
    unbroken = fleet.text(STORY, max_tokens=200)
    with fleet.stream(STORY, max_tokens=200) as stream:
        pieces = stream.pieces()
        text = next(pieces)
        fleet.processes()["nats"].send_signal(signal.SIGKILL)
        text += "".join(pieces)
    assert text == unbroken
    assert fleet.text(STORY, max_tokens=200) == unbroken
    until(lambda: fleet.home.run("status").returncode == 0, "NATS to be back", 20)
    until(lambda: fleet.status()["engine-0"]["alive"], "heartbeats to be heard again", 20)
    assert stored("EngineJoined")[: len(joins)] == joins
    assert stored("EngineLeft") == leaves
    assert fleet.serving(1, 2)


def test_killed_router_tracker_and_planner_come_back_and_no_connection_is_refused(fleet: Fleet) -> None:
    before = fleet.processes()
    for name in ("router", "tracker", "planner"):
        before[name].send_signal(signal.SIGKILL)
    psutil.wait_procs([before[name] for name in ("router", "tracker", "planner")], timeout=10)
    with httpx.Client(
        base_url=fleet.router, timeout=60, trust_env=False
    ) as client:  # its connections wait for the next router
        until(lambda: client.get("/ready").status_code == 200, "the router to know its engine again", 30)
    assert fleet.text("Still there?")
    until(lambda: {"router", "tracker", "planner"} <= fleet.processes().keys(), "all parts", 10)
    assert all(fleet.processes()[name].pid != before[name].pid for name in ("router", "tracker", "planner"))


def _login(message: dict[str, str]) -> dict[str, str]:
    return {key: message[key] for key in ("user", "password", "inbox_prefix")}


def test_garbage_on_every_subject_disturbs_nobody(fleet: Fleet) -> None:
    engine = fleet.status()["engine-0"]

    async def throw() -> None:
        subjects, worker = Subjects(), int(engine["worker_id"])
        for user, reached in {
            "engine": (
                subjects.kv_events,
                subjects.kv_metrics,
                subjects.heartbeats("engine-0"),
                subjects.experts("engine-0"),
                subjects.describe_profile,
            ),
            "router": (
                subjects.describe_engine("engine-0", worker),
                subjects.kv_snapshot("engine-0", worker, 0),
            ),
            "tracker": (subjects.profiles, subjects.demand),
            "planner": (subjects.placements("engine-0"),),
        }.items():
            client = await nats.connect(
                fleet.nats,
                **json.loads((fleet.run_directory / "bus" / f"{user}.json").read_text(), object_hook=_login),
            )
            for subject in reached:
                for garbage in (
                    b"",
                    b"\xff" * 100,
                    b"\x85",
                    b'{"kind": "EngineLeft"}',
                    bytes(range(256)) * 8,
                ):
                    await client.publish(subject, garbage)
            await client.flush()
            assert client.last_error is None, "it was refused"
            await client.close()

    asyncio.run(throw())
    asyncio.set_event_loop(None)
    pids = {name: process.pid for name, process in fleet.processes().items()}
    assert fleet.text("Still there?")
    assert fleet.status()["engine-0"]["alive"]
    assert {name: process.pid for name, process in fleet.processes().items()} == pids


def test_a_second_engine_of_one_name_is_refused_and_the_first_serves_on(fleet: Fleet, home: Home) -> None:
    home.environment["ROOST_WORKER_NAME"] = "engine-0"
    home.environment["ROOST_BUS_CREDENTIALS_FILE"] = str(
        fleet.run_directory / "bus" / "engine.json"
    )  # it is another user's home
    done = home.run("worker", "--ranks", "1", "--nats", fleet.nats)
    assert done.returncode == 1
    assert "the engine name 'engine-0' is taken: worker" in done.stderr
    assert "(--name)" in done.stderr
    assert fleet.status()["engine-0"]["alive"]
    assert fleet.text("Still there?")


def test_a_client_that_vanishes_frees_its_rank(fleet: Fleet) -> None:
    with fleet.stream(STORY, max_tokens=1500) as stream:
        next(stream.pieces())
    until(
        lambda: [rank["running"] for rank in fleet.status()["engine-0"]["ranks"]] == [0, 0],
        "no running sequence",
        10,
    )
