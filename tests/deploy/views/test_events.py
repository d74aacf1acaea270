"""A line per message: what it amounts to, never its bytes."""

import numpy as np
import pytest

from bus import Message, Received
from deploy.views.events import kind_of, text_line
from fleet.facts.activity import (
    CountsImported,
    DispatchMeasured,
    ExpertsActivated,
    RequestOutcome,
    RequestProfile,
    RequestsFinished,
    RequestsProfiled,
    SampledProfile,
)
from fleet.facts.demand import ClustersPublished, KeyedRows, PopularityShifted, TablesPublished
from fleet.facts.migrations import PlanEvaluated
from fleet.popularity import ExpertCounts, ExpertTable
from fleet.requests.demand import PopularityDescribed, RankPopularity
from fleet.signatures import ClusterModel, pack
from tests.deploy.loop_figures import PREDICTED, START

COUNTS = ExpertCounts.of(np.full((58, 256), 3))
PROFILE = ExpertTable.of(np.full((58, 256), 1 / 256))
SIGNATURE = pack(np.array([0.7, 0.3])).tobytes()
CLUSTERS = ClusterModel(5, np.full((3, 58, 256), 1 / 256, np.float32), np.full(3, 1 / 3, np.float32), 0.2)
REQUEST = RequestProfile(
    decision="d",
    tokens=100,
    cached_tokens=16,
    signature=SIGNATURE,
    blocks=bytes(48),
    block_signatures=bytes(48),
    sample=SampledProfile(prompt=COUNTS, completion=COUNTS),
)
OUTCOME = RequestOutcome(
    decision="d",
    worker_id=1,
    rank=0,
    prefix=7,
    tokens=bytes(400),
    session=1,
    tenant=2,
    predicted=SIGNATURE,
    predicted_local=0.5,
    prior_local=0.4,
)
WHO = {"engine": "a", "worker_id": 1, "rank": 0, "model": "m"}
RANK = RankPopularity(
    engine="a", rank=0, tokens_per_second=1.0, remote=None, wanted_remote=((0, 1, 2.0),) * 50
)
TABLES = TablesPublished(
    model="m",
    version=4,
    clusters=5,
    shares=bytes(12),
    trust={"prefix": 0.5, "tokens": 0.125},
    reliability={},
    gain=0.5,
    buckets=4096,
    token_rows=bytes(16384),
    token_ratios=bytes(65536),
    blocks=KeyedRows(keys=bytes(8000), rows=bytes(12000)),
)
HALVES = (0.5,) * 58
MEASURED = DispatchMeasured(
    **WHO,
    epoch=0,
    seconds=1.0,
    steps=10,
    step_seconds=0.1,
    tokens=20,
    pairs=40,
    remote_ranks=HALVES,
    local=HALVES,
    served=HALVES,
    balance=HALVES,
)
JUDGED = PlanEvaluated(
    engine="a",
    worker_id=1,
    plan="cafe",
    epoch=1,
    verdict="harmful",
    predicted_before=START,
    predicted_after=PREDICTED,
    plan_discount=0.5,
    reason="longer steps",
)
DESCRIBED = PopularityDescribed(
    model="m",
    tokens=1.0,
    tokens_per_second=1.0,
    fast=PROFILE,
    slow=PROFILE,
    ranks=(RANK,) * 3,
    clusters=(),
    shifted=False,
    divergence=None,
    threshold=None,
    sources=(),
    gain=0.0,
    outcomes=0,
    recall=None,
    prior_recall=None,
    stored_blocks=0,
    stored_bytes=0,
)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            ExpertsActivated(**WHO, epoch=0, seconds=1.0, tokens=5, cached_tokens=0, counts=COUNTS),
            ["counts=[58x256 sum 44544]"],
        ),
        (
            CountsImported(
                model="m",
                digest="abc",
                tokens=5,
                counts=ExpertCounts(layers=1, experts=2, width=3, values=b""),
            ),
            ["digest=abc", "unusable"],
        ),
        (
            RequestsProfiled(**WHO, epoch=0, clusters=5, requests=(REQUEST, REQUEST)),
            ["<2 requests, 200 tokens, 12 blocks, 2 whole profiles>"],
        ),
        (
            RequestsFinished(model="m", tables=4, clusters=5, requests=(OUTCOME,)),
            ["<1 requests, 1 with a known prefix>"],
        ),
        (
            ClustersPublished(model="m", record=CLUSTERS.record()),
            ["[version 5: 3 clusters of 58x256, sharpness 0.2]"],
        ),
        (
            TABLES,
            [
                "blocks=[1000 rows]",
                "sessions=[0 rows]",
                "token_ratios=<65536 bytes>",
                "trust={prefix: 0.5, tokens: 0.125}",
            ],
        ),
        (
            PopularityShifted(
                model="m", version=1, settled=False, divergence=0.0123456789, threshold=0.002, layers=(3, 1)
            ),
            ["settled=False", "divergence=0.0123457", "layers=(3, 1)"],
        ),
        (DESCRIBED, ["ranks=<3 ranks>", "slow=[58x256 sum 58]"]),
        (MEASURED, ["remote_ranks=<58 values, sum 29>", "tokens=20"]),
        (
            JUDGED,
            [
                "verdict=harmful",
                "predicted_after=[remote ranks 1.430, local 59.0%, balance 0.920, step 9.05 ms]",
                "measured_after=None",
            ],
        ),
    ],
)
def test_a_message_of_any_size_is_one_line_that_says_what_it_amounts_to(
    message: Message, words: list[str]
) -> None:
    line = text_line(Received("s", 1, 0, 0.0, message))
    assert kind_of(message) in line
    assert "\n" not in line
    assert len(line) < 400
    for word in words:
        assert word in line, line


def test_a_signature_is_read_as_clusters_and_weights() -> None:
    message = RequestsFinished(model="m", tables=1, clusters=1, requests=())
    assert "requests=()" in text_line(Received("s", 1, 0, 0.0, message))
    single = REQUEST.__class__(decision="d", tokens=1, cached_tokens=0, signature=SIGNATURE)
    line = text_line(Received("s", 1, 0, 0.0, single))  # type: ignore[arg-type]
    assert "signature=[0:0.70 1:0.30]" in line
