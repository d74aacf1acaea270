"""The main job on a real model: chat, decisions, spans, and the commands that look at a running fleet."""

import json
import re
import subprocess
from typing import Any

import pytest

from tests.system.fleets import MODEL, Fleet, until

PROMPT = "Write a Python function that adds two numbers."


def test_a_streamed_answer_is_the_whole_answer_in_pieces(fleet: Fleet) -> None:
    whole = fleet.chat(PROMPT).json()
    with fleet.stream(PROMPT, stream_options={"include_usage": True}) as stream:
        pieces = list(stream.pieces())
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 1
    assert (stream.roles, stream.finish, len(stream.ids)) == (1, whole["choices"][0]["finish_reason"], 1)


def test_models_health_and_readiness(fleet: Fleet) -> None:
    assert [model["id"] for model in fleet.http.get("/v1/models").json()["data"]] == [MODEL]
    assert fleet.http.get("/health").status_code == fleet.http.get("/ready").status_code == 200


def test_a_repeated_prompt_goes_where_its_prefix_is_cached(fleet: Fleet) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, again and again and again."
    first = fleet.decision(fleet.chat(prompt).headers["x-roost-decision-id"])

    def is_known() -> bool:
        """Ask without a request: it might go elsewhere, and its prefix with it.

        Other ranks may hold the first blocks, those of the chat template, from other prompts.
        """
        would = fleet.http.post("/v1/route", json=fleet.body(prompt)).json()
        overlaps = {f"{c['engine']}/{c['rank']}": c["overlap_blocks"] for c in would["candidates"]}
        return overlaps.pop(first["chosen"]) > max(overlaps.values())

    until(is_known, "the KV events of the first answer", 5)
    again = fleet.chat(prompt)
    second = fleet.decision(again.headers["x-roost-decision-id"])
    assert second["chosen"] == first["chosen"]
    assert second["candidates"][0]["overlap_blocks"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_served_decision_reads_back_term_by_term(fleet: Fleet) -> None:
    decision = fleet.decision(fleet.chat(PROMPT).headers["x-roost-decision-id"])
    assert decision["model"] == MODEL
    assert {f"{candidate['engine']}/{candidate['rank']}" for candidate in decision["candidates"]} == {
        "engine-0/0",
        "engine-0/1",
    }
    for candidate in decision["candidates"]:
        assert sum(candidate["terms_ms"].values()) == pytest.approx(candidate["score"], abs=1e-9)
    scores = [candidate["score"] for candidate in decision["candidates"]]
    assert decision["margin"] == pytest.approx(scores[1] - scores[0])
    assert decision["epochs"]["placement"] == {"engine-0": 0}


def test_one_trace_runs_from_the_client_through_the_router_into_the_engine(fleet: Fleet) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = fleet.http.post(
        "/v1/chat/completions", json=fleet.body(PROMPT), headers={"traceparent": f"00-{trace}-{parent}-01"}
    )
    decision = fleet.decision(answer.headers["x-roost-decision-id"])

    def spans_of_the_trace() -> dict[str, Any] | None:
        spans = {
            span["name"]: span
            for line in fleet.spans.read_text().splitlines()
            if (span := json.loads(line))["trace_id"] == trace
        }
        return spans if {"roost.engine.decode", f"chat {MODEL}"} <= spans.keys() else None

    spans = until(spans_of_the_trace, "the spans of router and rank", 10)
    server, decide, forward = spans[f"chat {MODEL}"], spans["roost.decide"], spans["roost.forward"]
    assert server["parent_id"] == parent
    assert decide["parent_id"] == forward["parent_id"] == server["span_id"]
    engine = [spans[f"roost.engine.{phase}"] for phase in ("queue", "prefill", "decode")]
    assert {span["parent_id"] for span in engine} == {forward["span_id"]}
    assert [span["service"] for span in (server, *engine)] == [
        "roost-router",
        "roost-engine",
        "roost-engine",
        "roost-engine",
    ]
    assert forward["start_ns"] <= engine[0]["start_ns"]
    assert engine[0]["end_ns"] == engine[1]["start_ns"]
    assert engine[2]["end_ns"] <= forward["end_ns"]
    assert len(decide["events"]) == len(decision["candidates"])
    for event, candidate in zip(decide["events"], decision["candidates"], strict=True):
        terms = [
            value for name, value in event["attributes"].items() if re.fullmatch(r"roost\.term\.\w+", name)
        ]
        assert sum(terms) == pytest.approx(candidate["score"], abs=1e-6), event["attributes"]


def test_a_dry_run_decides_without_running(fleet: Fleet) -> None:
    explanation = fleet.home.output("explain", "A prompt that nobody has asked before, for sure.")
    assert "chosen" in explanation
    assert "runner-up" in explanation
    assert "epochs: placement engine-0 0" in explanation
    record = json.loads(fleet.home.output("explain", PROMPT, "--max-tokens", "5", "--json"))
    assert record["expected_output_tokens"] == 5


def test_explain_reads_a_served_decision_back(fleet: Fleet) -> None:
    decision_id = fleet.chat(PROMPT).headers["x-roost-decision-id"]
    assert json.loads(fleet.home.output("explain", "--id", decision_id, "--json")) == fleet.decision(
        decision_id
    )
    done = fleet.home.run("explain", "--id", "nonsense")
    assert (done.returncode, "no decision 'nonsense'" in done.stderr) == (1, True)


def test_status_shows_engines_ranks_load_and_epochs(fleet: Fleet) -> None:
    engine = fleet.status()["engine-0"]
    assert (engine["alive"], engine["epoch"], engine["model"]) == (True, 0, MODEL)
    assert [rank["running"] for rank in engine["ranks"]] == [0, 0]
    table = fleet.home.output("status")
    assert fleet.nats in table
    assert f"engine-0: {MODEL}, dp, experts whole, epoch 0" in table
    assert re.search(r"^ +1 +alive +0 +0 +0 +\d+/2048 +http://127", table, re.MULTILINE)


def test_placement_shows_which_expert_is_where(fleet: Fleet) -> None:
    placement = json.loads(fleet.home.output("placement", "--json"))["engine-0"]
    assert (placement["epoch"], placement["ranks"]) == (0, 2)
    for ranks in placement["expert_of_slot"].values():
        assert sorted(expert for slots in ranks for expert in slots) == list(range(placement["experts"]))
    assert "0-15    16-31" in fleet.home.output("placement", "--layer", "1")
    assert "layers 0 to 3, not 99" in fleet.home.run("placement", "--layer", "99").stderr


def test_the_memory_of_each_rank_is_itemised_beside_its_resident_size(fleet: Fleet) -> None:
    shown = fleet.home.output("layout", "e0", "--memory")
    assert "KV pool" in shown
    ranks = json.loads(fleet.home.output("layout", "--memory", "--json"))["engine-0"]
    processes = fleet.processes()
    for rank, found in enumerate(ranks):
        items, process = found["items"], processes[f"engine-0/{rank}"].memory_info()
        assert found["resident"] == pytest.approx(process.rss, rel=0.1)
        assert sum(items.values()) == found["resident"]
        assert items["whole_experts"] == 64 * found["cell_bytes"], "4 layers of 32 experts on 2 ranks"
        own_cells = sum(found["cells"].values()) * found["cell_bytes"]
        own = own_cells + items["kv_pool"]
        assert found["resident_shared"] == pytest.approx(own + items["shared_with_ranks"], abs=1 << 20)
        assert process.shared == pytest.approx(found["resident_shared"] + items["libraries"], rel=0.1)
        assert items["communicators"] >= 0
        assert 0 < items["other"] < found["resident"] / 2


def test_stored_events_are_replayed_and_telemetry_is_followed(fleet: Fleet) -> None:
    replayed = [
        json.loads(line)
        for line in fleet.home.output("events", "--since", "1h", "--no-follow", "--json").splitlines()
    ]
    assert {"EngineJoined", "PlacementCommitted"} <= {event["kind"] for event in replayed}
    following = fleet.home.start("events", "--json", "--kind", "ExpertsActivated", "--kind", "KvEvents")

    def kinds() -> set[str]:
        fleet.chat(f"Something new, number {len(following.output)}.")
        return {json.loads(line)["kind"] for line in following.output.splitlines()}

    until(lambda: kinds() == {"ExpertsActivated", "KvEvents"}, "experts and KV events of a request", 20)
    assert following.stop() == 0


def test_the_tracker_publishes_what_was_activated(fleet: Fleet) -> None:
    following = fleet.home.start(
        "events", "--json", "--kind", "ProfilePublished", "--kind", "DemandPublished"
    )
    until(
        lambda: (
            fleet.chat(PROMPT)
            and "ProfilePublished" in following.output
            and "DemandPublished" in following.output
        ),
        "a profile and a demand",
        20,
    )
    following.stop()


def test_a_router_that_starts_late_knows_what_the_caches_hold(fleet: Fleet) -> None:
    prompt = "A router that starts late must ask for a snapshot of every cache, and then know this prompt."
    chosen = fleet.decision(fleet.chat(prompt).headers["x-roost-decision-id"])["chosen"]
    late = fleet.home.start("router", "--nats", fleet.nats, "--port", "0")
    late.says("listens on http://")
    found = re.search(r"listens on (http://\S+)", late.output)
    assert found is not None

    def cached() -> bool:
        done = fleet.home.run("explain", prompt, "--router", found[1], "--json")
        candidates = json.loads(done.stdout)["candidates"] if done.returncode == 0 else []
        return [f"{one['engine']}/{one['rank']}" for one in candidates if one["overlap_blocks"] > 3] == [
            chosen
        ]

    until(cached, "the overlap of a prompt served before the router started", 20)
    assert late.stop() == 0


def test_the_effective_configuration_names_the_variable(fleet: Fleet) -> None:
    done = subprocess.run(
        fleet.home.command("config"),
        env={**fleet.home.environ, "ROOST_ENGINE_RANKS": "4"},
        cwd=fleet.home.state,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ranks = 4  # ROOST_ENGINE_RANKS" in done.stdout
