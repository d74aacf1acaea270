"""Prediction of what a request activates, priced at every target. Pure."""

from weakref import ref

import numpy as np

from fleet.prediction import Query
from fleet.signatures import ClusterModel
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.prediction.predictor import Predictor, RequestPrediction
from router.scheduling.decision import RemotePrefill, TargetPredictions
from router.scheduling.routing_request import RoutingRequest


def predicted(
    predictor: Predictor,
    view: FleetView,
    target_table: TargetTable,
    need: RoutingRequest,
    longest: int,
) -> TargetPredictions | None:
    """Predict for all targets. A prompt known only as text is predicted by its sender alone,
    since its hashes are not those of token blocks.

    longest: most leading blocks that a target holds. They were computed before, so that their signature is
    probably known.
    """
    # stored signatures are of the smallest blocks where engines differ
    size, prompt = target_table.block_sizes[0], need.prompt
    prefix = prompt.chained(size) if prompt.ids else ()
    keys = need.keys
    request_prediction = predictor.predict(
        need.model, Query(prefix, prompt.ids, size, keys.session, keys.tenant, longest)
    )
    if request_prediction is None:
        return None
    prices, clusters = view.prices(need.model), view.clusters(need.model)
    if clusters is None or clusters.version != request_prediction.clusters:
        used = None
    else:
        used = ref(clusters)
        if need.prefill is not None:
            request_prediction = _with_prompt(request_prediction, need, need.prefill, clusters)
    if prices.clusters != len(request_prediction.weights):
        nothing = np.zeros((4, len(target_table.targets)))
        unpriced = np.zeros(len(target_table.targets), np.bool_)
        return TargetPredictions(request_prediction, nothing, nothing[0], unpriced, clusters=used)
    expert_load = prices.of(request_prediction.weights)
    prior, home = prices.prior_local(request_prediction.shares), prices.home(request_prediction.weights)
    return TargetPredictions(
        request_prediction, expert_load, prior, prices.priced, home, prices.versions, used
    )


def _with_prompt(
    predicted: RequestPrediction, need: RoutingRequest, prefill: RemotePrefill, clusters: ClusterModel
) -> RequestPrediction:
    """Return the prediction with the signature of what the prompt activated at its prefill worker, as far as
    that is known and of the shape of these clusters.
    """
    if prefill.experts is None or prefill.experts.shape != clusters.profiles.shape[1:]:
        return predicted
    share = min(1.0, prefill.tokens / need.prompt.tokens)
    return predicted.with_prompt(clusters.signature(prefill.experts), share, prefill.tokens)
