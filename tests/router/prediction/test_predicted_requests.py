"""From a client's request to its report at the tracker: the sender's keys, the prediction, the choice of
rank, the explanation and the report.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Message
from bus.memory import MemoryBroker, MemoryBus
from deploy.views.decision import show_decision
from fleet.blocks import SEED, local_hashes, sequence_hashes
from fleet.completions import DECISION_HEADER, ApiError
from fleet.facts.activity import RequestOutcome, RequestsFinished
from fleet.facts.engines import Capabilities
from fleet.requests.demand import DescribeClusters
from fleet.signatures import unpack
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.feedback.outcome_reporter import BATCH, OutcomeReporter
from router.prediction.predictor import NO_GAIN, PredictionKeys, keys_of
from router.prefix_index.block_hash_chain import BlockHashChain
from router.prefix_index.prompt import TextPrompt, TokenPrompt
from router.scheduling.decision import DecisionRecord
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.router.learnt_tables import halves, published_clusters, tables
from tests.router.metric_values import value_of
from tests.router.router_fixture import (
    House,
    MockRank,
    OpenHouse,
    Serve,
    chat,
    engine_joined,
    rendered,
    until,
)

CHAT, TEXT, ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/route"
FAR = EngineSpeed(dispatch=1e-3)


class Reports:
    """Collects the routers' reports of finished requests."""

    def __init__(self) -> None:
        self.messages: list[RequestsFinished] = []

    @property
    def outcomes(self) -> list[RequestOutcome]:
        return [outcome for message in self.messages for outcome in message.requests]

    async def listen(self, house: House, ready: asyncio.Event) -> None:
        async with house.bus.subscribe(house.subjects.requests_finished) as subscription:
            ready.set()
            async for received in subscription:
                assert isinstance(received.message, RequestsFinished)
                self.messages.append(received.message)


@pytest.fixture
async def house(open_house: OpenHouse) -> House:
    return await open_house(outcome_seconds=0.02)


@pytest.fixture
async def reports(house: House) -> AsyncIterator[Reports]:
    reports, ready = Reports(), asyncio.Event()
    task = asyncio.create_task(reports.listen(house, ready))
    await ready.wait()
    yield reports
    task.cancel()
    await asyncio.wait([task])


async def engine(
    house: House, serve_rank: Serve, packed: bytes, count: int = 2, **about: Any
) -> list[MockRank]:
    """Return one engine of `count` ranks. Experts 0 and 1 of every layer are on its first half."""
    ranks = [await serve_rank(MockRank(packed)) for _ in range(count)]
    await house.join("e", [rank.url for rank in ranks], packed, speed=FAR, worker_id=2**64 - 9, **about)
    return ranks


async def teach(house: House, **fields: Any) -> None:
    """Publish clusters and full tables as the tracker, and wait until both have arrived."""
    version = fields.pop("version", 5)
    await house.bus.publisher(house.subjects.clusters).publish(published_clusters(halves(version)))
    await house.bus.publisher(house.subjects.tables).publish(tables(version, clusters=version, **fields))

    def come() -> bool:
        replica = house.service.scheduler.predictor.replica("demo")
        priced = house.service.view.prices("demo").priced
        return (
            replica is not None
            and replica.tables is not None
            and replica.tables.version == version
            and bool(priced.all())
        )

    await until(come)


def ids_of(rank: MockRank, text: str = "hello there") -> list[int]:
    return rank.tokenizer.encode_rendered(rendered(text))


def blocks_of(ids: list[int]) -> list[int]:
    return sequence_hashes(local_hashes(ids, 4))


# Choice of a rank


@pytest.mark.parametrize("home", [0, 1])
async def test_a_request_goes_where_the_experts_of_its_known_prefix_live(
    house: House, serve_rank: Serve, byte_archive: bytes, home: int
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    blocks = blocks_of(ids_of(ranks[0]))
    weights = (0.95, 0.05) if home == 0 else (0.05, 0.95)
    await teach(
        house, blocks={block: (weights, 4.0 * at) for at, block in enumerate(blocks[:6], 1)}, gain=1.0
    )
    for seed in range(6):
        answer = await house.post(CHAT, chat(seed=seed))
        record = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json
        assert record["chosen"] == f"e/{home}"
        assert record["prediction"]["known_blocks"] == 6
        assert record["prediction"]["prefix"] == str(blocks[5])
        assert record["prediction"]["best"] == "prefix"
        assert record["candidates"][0]["local_share"] > 0.6 > 0.4 > record["candidates"][1]["local_share"]
        terms = [candidate["terms_ms"]["experts"] for candidate in record["candidates"]]
        assert terms[0] < terms[1]


async def test_without_gain_tables_or_an_expert_parallel_layout_the_term_is_zero_and_says_why(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    async def notes() -> set[str]:
        record = (await house.post(ROUTE, chat())).json
        assert all(candidate["terms_ms"]["experts"] == 0 for candidate in record["candidates"])
        return {candidate["experts_note"] for candidate in record["candidates"]}

    ranks = await engine(house, serve_rank, byte_archive)
    assert await notes() == {"no clusters of this model yet: experts are not priced"}
    await house.bus.publisher(house.subjects.clusters).publish(published_clusters(halves()))
    await until(lambda: house.service.view.prices("demo").priced.all())
    assert await notes() == {"no prediction tables of this model yet: experts are not priced"}
    await teach(house, gain=0.0, blocks={blocks_of(ids_of(ranks[0]))[0]: ((0.9, 0.1), 99.0)})
    assert await notes() == {NO_GAIN}


async def test_a_continuation_is_predicted_from_prompt_and_emitted_tokens(
    house: House, serve_rank: Serve, byte_archive: bytes, reports: Reports
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    first_prompt = ids_of(ranks[0])
    whole = first_prompt + ranks[0].ids(first_prompt, 5, 20)
    deep = blocks_of(whole)[len(first_prompt) // 4 + 2]
    await teach(house, blocks=dict.fromkeys(blocks_of(whole), ((0.95, 0.05), 9.0)))
    ranks[0].die_after = 15
    answer = await house.post(CHAT, chat(max_tokens=20, stream=True))
    assert len(answer.events) > 15
    await until(lambda: reports.outcomes)
    [outcome] = reports.outcomes
    assert outcome.rank == 1
    assert outcome.decision.endswith("-a2")
    assert blocks_of(whole).index(outcome.prefix) >= blocks_of(whole).index(deep)


# Reports


@pytest.mark.parametrize("stream", [False, True])
async def test_every_completed_choice_is_reported_once_after_its_end(
    house: House, serve_rank: Serve, byte_archive: bytes, reports: Reports, stream: bool
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    ids = ids_of(ranks[0])
    await teach(house, blocks={blocks_of(ids)[0]: ((0.7, 0.3), 4.0)}, gain=0.5, shares=(0.25, 0.75))
    answer = await house.post(
        CHAT, chat(stream=stream, n=3), headers={"x-session-id": "s", "x-tenant-id": "t"}
    )
    assert answer.status == 200
    await until(lambda: len(reports.outcomes) == 3)
    await asyncio.sleep(0.05)
    assert len(reports.outcomes) == 3, "and never again"
    decision_id = answer.headers["x-roost-decision-id"]
    assert {outcome.decision for outcome in reports.outcomes} == {
        decision_id,
        f"{decision_id}-c1",
        f"{decision_id}-c2",
    }
    assert {(message.model, message.tables, message.clusters) for message in reports.messages} == {
        ("demo", 5, 5)
    }
    keys = keys_of("s", "t", "demo", CHAT)
    prices = house.service.view.prices("demo").local
    for outcome in reports.outcomes:
        assert (outcome.worker_id, outcome.prefix) == (2**64 - 9, blocks_of(ids)[0])
        assert PredictionKeys(outcome.session, outcome.tenant) == keys
        assert np.frombuffer(outcome.tokens, "<u4").tolist() == ids[4:]
        shares = np.array([0.25, 0.75], np.float32)
        weights = unpack(outcome.predicted, shares)
        assert outcome.predicted_local == pytest.approx(float(prices[outcome.rank] @ weights), abs=0.01)
        assert outcome.prior_local == pytest.approx(float(prices[outcome.rank] @ shares), abs=1e-6)
        beside = prices @ (weights - shares)
        assert outcome.spread == pytest.approx(float(beside.max() - beside.mean()), abs=0.01)
    assert b"roost_router_outcomes_published_total 3.0" in house.service.metrics.exposition()
    assert b'roost_router_predictions_total{source="prefix"} 3.0' in house.service.metrics.exposition()


async def test_after_failed_attempts_only_the_rank_that_answered_is_reported(
    house: House, serve_rank: Serve, byte_archive: bytes, reports: Reports
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    await teach(house)
    ranks[0].answer_status = ranks[1].answer_status = 500
    assert (await house.post(CHAT, chat())).status == 503
    ranks[0].answer_status = ranks[1].answer_status = 200
    ranks[0].hang_up_once = ranks[1].hang_up_once = True
    answer = await house.post(CHAT, chat())
    assert answer.status == 200
    await until(lambda: reports.outcomes)
    assert [outcome.decision for outcome in reports.outcomes] == [answer.headers["x-roost-decision-id"]]
    assert reports.outcomes[0].decision.endswith(("-a2", "-a3"))


async def test_before_there_are_tables_requests_are_reported_with_evidence(
    house: House, serve_rank: Serve, byte_archive: bytes, reports: Reports
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    await house.post(CHAT, chat(user="ann"))
    await until(lambda: reports.outcomes)
    [outcome] = reports.outcomes
    assert (reports.messages[0].tables, reports.messages[0].clusters) == (0, 0)
    assert (outcome.predicted, outcome.predicted_local, outcome.prior_local, outcome.spread) == (
        bytes(8),
        None,
        None,
        None,
    )
    assert np.frombuffer(outcome.tokens, "<u4").tolist() == ids_of(ranks[0])
    assert outcome.tenant == keys_of(None, "ann", "demo", CHAT).tenant


async def test_engines_that_report_no_experts_are_not_reported(
    house: House, serve_rank: Serve, byte_archive: bytes, reports: Reports
) -> None:
    await engine(house, serve_rank, byte_archive, shape=None, placement=None)
    assert (await house.post(CHAT, chat())).status == 200
    await asyncio.sleep(0.06)
    assert not reports.outcomes


async def test_ranks_learn_the_id_of_the_decision_that_chose_them(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    ranks[0].hang_up_once = ranks[1].hang_up_once = True
    answer = await house.post(CHAT, chat())
    sent = [
        {name.lower(): value for name, value in headers.items()}["x-roost-decision-id"]
        for rank in ranks
        for headers in rank.headers
    ]
    assert sent == [answer.headers["x-roost-decision-id"]]
    assert (await house.get(f"/v1/decisions/{sent[0]}")).status == 200


# Keys of the sender


@pytest.mark.parametrize(
    ("headers", "body", "session", "tenant"),
    [
        ({}, {}, None, None),
        ({"x-session-id": "one"}, {"prompt_cache_key": "two"}, "one", None),
        ({}, {"prompt_cache_key": "two"}, "two", None),
        ({"x-tenant-id": "a"}, {"user": "b", "safety_identifier": "c"}, None, "a"),
        ({}, {"user": "b", "safety_identifier": "c"}, None, "b"),
        ({}, {"safety_identifier": "c"}, None, "c"),
        ({"x-session-id": "", "x-tenant-id": ""}, {"prompt_cache_key": "", "user": ""}, None, None),
        ({"x-session-id": "\xff" * 900}, {}, "\xff" * 900, None),
        ({"X-Session-ID": "Größe"}, {}, "Größe", None),
    ],
)
async def test_who_asks_is_read_from_headers_then_from_the_body(
    house: House,
    serve_rank: Serve,
    byte_archive: bytes,
    reports: Reports,
    headers: dict[str, str],
    body: dict[str, str],
    session: str | None,
    tenant: str | None,
) -> None:
    await engine(house, serve_rank, byte_archive)
    assert (await house.post(CHAT, chat(**body), headers=headers)).status == 200
    await until(lambda: reports.outcomes)
    [outcome] = reports.outcomes
    if session is not None and not session.isascii():
        # The UTF-8 of a client is read byte by byte, which identifies the session as well.
        session = session.encode().decode("latin-1")
    assert PredictionKeys(outcome.session, outcome.tenant) == keys_of(session, tenant, "demo", CHAT)
    assert (outcome.session != 0) == (session is not None)


async def test_the_headers_names_are_settings(
    open_house: OpenHouse, serve_rank: Serve, byte_archive: bytes
) -> None:
    house = await open_house(session_header="x-conversation", tenant_header="x-org")
    await engine(house, serve_rank, byte_archive)
    answer = await house.post(
        CHAT, chat(), headers={"x-conversation": "s", "x-org": "t", "x-session-id": "no", "x-tenant-id": "no"}
    )
    decision = house.service.scheduler.kept.get(answer.headers[DECISION_HEADER])
    assert decision is not None
    assert decision.ask.keys == keys_of("s", "t", "demo", CHAT)


@pytest.mark.parametrize("name", ["", "X-Session", "a b", "a:b", "naïve", "authorization", "x-request-id"])
def test_a_name_that_is_no_header_of_ones_own_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="session_header"):
        RouterConfig(session_header=name)


async def test_a_body_that_names_its_session_wrongly_is_refused(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engine(house, serve_rank, byte_archive)
    answer = await house.post(CHAT, chat(prompt_cache_key=5))
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_cache_key")


def test_keys_tell_apart_what_differs_and_are_never_none_by_chance() -> None:
    identities = [
        ("s", "t", "m", "/a"),
        ("s", "u", "m", "/a"),
        ("t", "s", "m", "/a"),
        (None, "t", "m", "/a"),
        (None, None, "m", "/a"),
        (None, None, "m", "/b"),
    ]
    identities += [(None, None, "n", "/a"), (None, "t", "n", "/a"), ("s", None, "m", "/a")]
    found = [keys_of(*one) for one in identities]
    sessions = [keys.session for keys in found if keys.session]
    assert len(set(sessions)) == len(sessions) == 4
    assert len({keys.tenant for keys in found}) == 7, "a tenant's key is the same with and without a session"
    assert keys_of("s", "t", "m", "/a") == found[0]
    assert all(0 < keys.tenant < 2**64 for keys in found)
    assert keys_of("s", "t", "m", "/a").session == keys_of("s", "t", "other", "/b").session, (
        "a session continues with any model"
    )


async def test_explaining_predicts_the_same_as_the_request_itself(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    await engine(house, serve_rank, byte_archive)
    keys = keys_of("s", "t", "demo", CHAT)
    await teach(
        house, sessions={keys.session: ((0.9, 0.1), 500.0)}, tenants={keys.tenant: ((0.6, 0.4), 5000.0)}
    )
    identity = {"x-session-id": "s", "x-tenant-id": "t"}
    explained = (await house.post(ROUTE, chat(), headers=identity)).json["prediction"]
    answer = await house.post(CHAT, chat(), headers=identity)
    served = (await house.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json["prediction"]
    assert explained == served
    assert [source["source"] for source in served["sources"]] == ["session", "tenant"]
    assert served["best"] in ("session", "tenant")


# Explanation


async def test_an_explanation_is_readable(
    house: House, serve_rank: Serve, byte_archive: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = await engine(house, serve_rank, byte_archive)
    blocks = blocks_of(ids_of(ranks[0]))
    show_decision((await house.post(ROUTE, chat())).body)
    assert "predicted" not in capsys.readouterr().out
    await teach(house, blocks={blocks[0]: ((0.9, 0.1), 96.0)}, gain=0.5)
    show_decision((await house.post(ROUTE, chat())).body)
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted: cluster 0: 8" in shown
    assert "gain 0.50; 1 blocks of the prompt known" in shown
    assert "prefix: 96 tokens of evidence, confidence 0.43" in shown
    assert "tables 5; clusters 5" in shown
    await teach(house, version=6)
    show_decision((await house.post(ROUTE, chat())).body)
    assert "no information about this request" in capsys.readouterr().out


# The text dialect


async def test_a_prompt_known_only_as_text_is_predicted_only_by_its_sender(house: House) -> None:
    joined = await house.join(
        "text",
        ["http://h:1", "http://h:2"],
        None,
        capabilities=Capabilities(kv_events=False, token_ids=False),
    )
    text = TextPrompt(b"a text of some length, long enough for blocks" * 4, "demo")
    keys = keys_of("s", None, "demo", CHAT)
    await teach(
        house,
        blocks=dict.fromkeys(text.chained(4), ((0.1, 0.9), 99.0)),
        sessions={keys.session: ((0.9, 0.1), 500.0)},
        tokens=np.ones((3, 2)),
    )
    decision = house.service.decide(RoutingRequest("demo", text, 0, 10, None, keys=keys), "d")
    assert decision.prediction is not None
    assert decision.prediction.request.best == "session"
    assert decision.prediction.request.blocks == 0
    assert decision.prediction.request.evidence[2] == 0
    assert joined.engine == decision.target.engine.engine


# Publishing: batches, limits, and a failing bus


def service_of(broker: MemoryBroker, **settings: Any) -> RouterService:
    service = RouterService(MemoryBus(broker), broker.subjects, RouterConfig(**settings))
    joined = engine_joined("e", ["http://h:1"], None, worker_id=7)
    service.view.join(joined, 0.0)
    service.view.sign_of_life(7, 0.0)
    return service


def noted(service: RouterService, outcomes: OutcomeReporter, number: int) -> None:
    prompt = TokenPrompt([1, 2, number])
    request_log = RequestLog("r", f"d{number}", CHAT, 0.0)
    request_log.model = "demo"
    decision, booking = service.book(
        request_log, RoutingRequest("demo", prompt, 3, 10, None, keys=request_log.keys()), "", Attempt()
    )
    service.release(booking)
    outcomes.note(decision, prompt)


@pytest.mark.looptime
async def test_outcomes_are_published_in_batches_at_once_when_many_wait_and_dropped_beyond_the_limit() -> (
    None
):
    broker = MemoryBroker()
    service = service_of(broker)
    outcomes = OutcomeReporter(
        MemoryBus(broker), broker.subjects, service.metrics, seconds=10.0, max_waiting=100
    )
    batches: list[tuple[float, int]] = []
    loop = asyncio.get_running_loop()

    async def listen() -> None:
        async for received in subscription:
            assert isinstance(received.message, RequestsFinished)
            batches.append((round(loop.time() - start, 1), len(received.message.requests)))

    async with MemoryBus(broker).subscribe(broker.subjects.requests_finished) as subscription:
        start = loop.time()
        tasks = [asyncio.create_task(outcomes.run()), asyncio.create_task(listen())]
        noted(service, outcomes, 0)
        await asyncio.sleep(11)
        assert batches == [(10.0, 1)]
        for number in range(BATCH):
            noted(service, outcomes, number)
        await asyncio.sleep(1)
        assert batches[1:] == [(11.0, BATCH)], "without waiting"
        for number in range(130):
            noted(service, outcomes, number)
        await asyncio.sleep(1)
        assert [count for _, count in batches[2:]] == [BATCH, 100 - BATCH]
        assert value_of(service.metrics.outcomes_dropped) == 30
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_router_without_a_bus_predicts_and_publishes_nothing() -> None:
    service = RouterService(None, MemoryBroker().subjects, RouterConfig())
    joined = engine_joined("e", ["http://h:1"], None, worker_id=7)
    service.view.join(joined, 0.0)
    service.view.sign_of_life(7, 0.0)
    decision = service.decide(RoutingRequest("demo", TokenPrompt([1, 2, 3]), 3, 10, None), "d")
    booking = service.scheduler.book(decision, TokenPrompt([1, 2, 3]), 0.0)
    service.finished(decision, booking, TokenPrompt([1, 2, 3]))
    record = msgspec.json.decode(msgspec.json.encode(decision.record()), type=DecisionRecord)
    assert record.prediction is None
    service.threads.shutdown()


async def test_an_engine_that_left_takes_its_models_tables_with_it(
    house: House, serve_rank: Serve, byte_archive: bytes
) -> None:
    async def describe(request: Message) -> Message:
        return published_clusters(halves()) if isinstance(request, DescribeClusters) else tables(9)

    async with house.bus.serve(house.subjects.describe_profile, describe):
        await engine(house, serve_rank, byte_archive)
        await until(lambda: house.service.scheduler.predictor.replica("demo") is not None)
        house.service.forget_worker(2**64 - 9)
        assert house.service.scheduler.predictor.replica("demo") is None
        with pytest.raises(ApiError):
            house.service.decide(RoutingRequest("demo", TokenPrompt([1]), 1, 1, None), "d")


# Chains


def test_a_chain_is_the_list_of_sequence_hashes_computed_as_far_as_requested() -> None:
    ids = list(range(800))
    whole = sequence_hashes(local_hashes(ids, 16))
    chain = BlockHashChain(ids, 16, SEED)
    assert len(chain) == 50
    assert chain[3] == whole[3]
    assert len(chain.hashes) == 4
    assert chain[10:20] == whole[10:20]
    assert chain[20:10:-3] == whole[20:10:-3]
    assert chain[20:10] == chain[60:] == []
    assert len(chain.hashes) == 21
    assert list(chain) == whole
    assert chain[:] == whole
    assert len(chain.hashes) == 50
    with pytest.raises(IndexError):
        chain[50]
