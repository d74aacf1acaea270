"""Views, requests and decisions made by hand, for tests of what is decided."""

from typing import Any

import numpy as np

from fleet.dispatch import numbered
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.reservations import AMOUNTS, Reservations
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.prediction.predictor import RequestPrediction
from router.scheduling.cost import Weights
from router.scheduling.decision import Ask, Conditions, Decision, TargetPredictions, decide
from router.scheduling.filters import SaturationLimits, candidates
from router.scheduling.policies import PolicyRules
from tests.router.router_fixture import engine_joined

LIMITS = SaturationLimits(requests=10, queue_seconds=5.0)
SLOW = EngineSpeed(prefill_token=1e-3, decode_sequence=1e-3, decode_block=1e-5, dispatch=1e-5)


def view_of(*engines: dict[str, Any], clusters: ClusterModel | None = None) -> tuple[FleetView, Reservations]:
    """A view of live, priced engines named e0, e1, ...; each given as what differs from the ordinary."""
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    if clusters is not None:
        view.learn("demo", clusters)
    for number, about in enumerate(engines):
        ranks = about.pop("ranks", 2)
        tokenizer = about.pop("tokenizer", "f" * 64)
        joined = engine_joined(
            f"e{number}",
            [f"http://h:{9000 + 10 * number + rank}" for rank in range(ranks)],
            tokenizer,
            worker_id=number + 1,
            **about,
        )
        view.join(joined, 0.0)
        view.sign_of_life(joined.worker_id, 0.0)
        state = view.engine(joined.worker_id)
        assert state is not None
        found = locality(
            numbered(state.nodes), joined.shape, state.layout, state.placement, clusters, state.rules
        )
        view.price(joined.worker_id, None if state.placement is None else state.placement.epoch, found)
    return view, reservations


def ask(seed: int = 0, prompt: int = 100, output: int = 20) -> Ask:
    return Ask(decision_id="d", seed=seed, model="demo", prompt_tokens=prompt, output_tokens=output)


def decided(
    target_table: TargetTable,
    load: Any = None,
    overlap: Any = None,
    weights: Weights = Weights(),  # noqa: B008 immutable
    prediction: TargetPredictions | None = None,
    rules: PolicyRules | None = None,
    conditions: Any = None,
    **asked: int,
) -> Decision:
    """conditions: what is to be said beside the load; prompt, output, seed: as `ask`."""
    load = np.zeros((AMOUNTS, len(target_table.targets)), np.int64) if load is None else np.asarray(load)
    overlap = np.zeros(len(target_table.targets), np.int64) if overlap is None else np.array(overlap)
    return decide(
        ask(**asked),
        target_table,
        candidates(target_table, load, 1, LIMITS),
        overlap,
        Conditions(load, **(conditions or {})),
        rules or PolicyRules(weights=weights),
        1,
        prediction,
    )


def prediction_of(
    remote: Any,
    gain: float = 1.0,
    local: Any = None,
    priced: Any = None,
    nodes: Any = None,
    added: Any = None,
) -> TargetPredictions:
    """A prediction with these expected remote ranks per target, and so on."""
    remote = np.asarray(remote, np.float64)
    local = np.zeros(len(remote)) if local is None else np.asarray(local, np.float64)
    request_prediction = RequestPrediction(
        np.array([0.8, 0.2], np.float32),
        np.full(2, 0.5, np.float32),
        gain,
        7,
        3,
        2,
        2**64 - 5,
        slice(8, 264),
        (8.0, 0, 0, 0),
        [0.75, 0, 0, 0],
    )
    nodes, added = (
        np.zeros(len(remote)) if table is None else np.asarray(table, np.float64) for table in (nodes, added)
    )
    priced = np.ones(len(remote), np.bool_) if priced is None else np.asarray(priced)
    return TargetPredictions(request_prediction, np.stack([remote, nodes, local, added]), local, priced)
