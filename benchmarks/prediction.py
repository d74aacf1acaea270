"""Quality of expert prediction: recorded routings pass through router, rank and tracker as in a fleet;
requests of other documents are predicted before any of their content was learnt.

The truth of a request is its remaining activations: its uncached prompt and its completion (`all`), or its
completion alone. Recall is the mass of the true more popular half of a layer's experts (top 16 of 32) that is
in the predicted half, relative to that half's whole mass. KL is the divergence of the truth from the
prediction, nats per pair, mean over layers. `prior` is the traffic's mix; a source `alone` gets the weight of
maximum likelihood for the training requests. Skill is the cosine between the predicted and the true
difference from the mean: a constant prediction has no skill, also for untrained routers.

    python -m benchmarks.prediction --quick
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.demo_model import routings_path
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.tracking import RANKS, Fleet
from benchmarks.rig.traffic import Request, Routings, counted, load, request, stream, tenants, untrained
from fleet.arrays import Float32Array
from fleet.prediction import FLOOR, SOURCES
from fleet.signatures import MIN_PROBABILITY
from fleet.timing import expected_local_share

RECALL_GAIN, QUIET, LOUD = 0.12, 0.1, 0.3
"""least recall above the prior's on cold requests; highest gain where prediction is useless; least gain where
it is useful"""
NO_MATTER = {"recall": 0.0, "KL": -0.001}
"""Tolerance of combined against single sources: a thousandth of a nat is negligible."""
TRUSTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
RESAMPLED = 10_000
BINS = 10
COMBINED, PRIOR, HINDSIGHT = "combined", "prior", "hindsight"

Table = NDArray[np.float64]
File = typer.Option(
    routings_path(),
    "--routings",
    help="recorded routings, in the format of benchmarks.demo_model.record_routings",
)
Seeds = typer.Option(
    3, "--seeds", min=1, help="number of random orders of requests and of their names (1 with --quick)"
)


class Quality(NamedTuple):
    """Quality by request: float64 [n] each. `all`: over all remaining activations; `completion`: over those
    of the completion alone."""

    recall_all: Table
    recall_completion: Table
    kl_all: Table
    kl_completion: Table


@dataclass
class Scenario:
    """Requests predicted with the same kinds of knowledge, after a fleet has learnt."""

    name: str
    fleet: Fleet
    requests: list[Request]

    def weights(self) -> dict[str, Table]:
        """Return float64 [n, K] by prediction: combined, each source with a prediction, the mix."""
        trusts, found = alone(self.fleet), dict[str, list[Float32Array]]()
        tables = self.fleet.tables
        for asked in self.requests:
            said = self.fleet.ask(asked)
            found.setdefault(COMBINED, []).append(said.weights)
            for at, source in enumerate(SOURCES):
                if said.known.evidence[at]:
                    found.setdefault(source, []).append(
                        _pooled(tables.shares, trusts[at] * said.known.ratios[at])
                    )
            found.setdefault(PRIOR, []).append(tables.shares)
        return {
            name: np.stack(rows).astype(np.float64)
            for name, rows in found.items()
            if len(rows) == len(self.requests)
        }

    def truth(self) -> tuple[Table, Table]:
        return counted(self.requests, self.fleet.experts, self.fleet.prompt)

    def qualities(self) -> dict[str, Quality]:
        """Return the quality by prediction, and as an upper bound the best that the clusters could
        express."""
        everything, completion = self.truth()
        weights = self.weights() | {HINDSIGHT: self.fleet.model.signature(everything).astype(np.float64)}
        return {name: quality(self.expected(each), everything, completion) for name, each in weights.items()}

    def expected(self, weights: Table) -> Table:
        """float64 [n, layers, experts]"""
        return np.asarray(np.tensordot(weights, self.fleet.model.profiles.astype(np.float64), 1))


def quality(predicted: Table, everything: Table, completion: Table) -> Quality:
    return Quality(
        recall(predicted, everything),
        recall(predicted, completion),
        divergence(predicted, everything),
        divergence(predicted, completion),
    )


def recall(predicted: Table, counts: Table) -> Table:
    """float64 [n] of [n, layers, experts] each."""
    half = counts.shape[2] // 2
    true, foreseen = (np.argsort(-table, axis=2, kind="stable")[:, :, :half] for table in (counts, predicted))
    hit = np.zeros(counts.shape, bool)
    np.put_along_axis(hit, foreseen, True, axis=2)
    masses = np.take_along_axis(counts, true, axis=2)
    found = (masses * np.take_along_axis(hit, true, axis=2)).sum(axis=(1, 2))
    return np.asarray(found / np.maximum(masses.sum(axis=(1, 2)), 1.0))


def divergence(predicted: Table, counts: Table) -> Table:
    """Return float64 [n]: Kullback-Leibler divergence of counts from predictions, mean over layers."""
    truth = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1.0)
    ratios = np.log(np.maximum(truth, MIN_PROBABILITY)) - np.log(np.maximum(predicted, MIN_PROBABILITY))
    return np.asarray((truth * ratios).sum(axis=2).mean(axis=1))


def skill(predicted: Table, counts: Table) -> float:
    """Return the mean cosine between predicted and true differences from the mean request; [n, layers,
    experts] each."""
    truth = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1.0)
    one, two = ((table - table.mean(axis=0)).reshape(len(table), -1) for table in (predicted, truth))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
    return float(((one * two).sum(axis=1) / np.maximum(lengths, MIN_PROBABILITY)).mean())


def _pooled(shares: Float32Array, ratios: NDArray[np.float32]) -> Float32Array:
    weights = shares * np.exp(ratios - ratios.max())
    return np.asarray(weights / weights.sum(), np.float32)


def alone(fleet: Fleet) -> tuple[float, ...]:
    """Return the maximum-likelihood weight of each source, as if it were the only one."""
    return tuple(_best_trust(fleet, at) for at in range(len(SOURCES)))


def _best_trust(fleet: Fleet, source: int) -> float:
    heard = [said for said in fleet.said if said.ratios[source].any()]
    if not heard:
        return 1.0

    def likelihood(trust: float) -> float:
        pooled = (
            (1 - FLOOR) * _pooled(said.shares, trust * said.ratios[source]) + FLOOR * said.shares
            for said in heard
        )
        return float(
            sum(
                said.observed @ np.log(np.maximum(weights, MIN_PROBABILITY))
                for said, weights in zip(heard, pooled, strict=True)
            )
        )

    return max(TRUSTS, key=likelihood)


# Learning


def learnt(routings: Routings, rows: NDArray[np.intp], seed: int, *, shuffled: bool = False) -> Fleet:
    """Return a fleet that has served these requests. shuffled: ranks report the activations of a random other
    request."""
    random = np.random.default_rng(seed)
    fleet = Fleet(routings.layers, routings.width, routings.prompt, random)
    for asked, known in stream(routings, rows, random):
        happens = (
            asked._replace(routed=request(routings, random.choice(rows)).routed[: len(asked.routed)])
            if shuffled
            else asked
        )
        if known:
            fleet.serve(asked, happens)
        else:
            fleet.leave_prefix(happens)
    return fleet


def scenarios(routings: Routings, fleet: Fleet, seed: int) -> list[Scenario]:
    """Return the test requests, with increasing knowledge about them."""
    rows, names = routings.where(1), tenants(routings, np.random.default_rng(seed + 1000))
    whole = [request(routings, row) for row in rows]
    named = [request(routings, row, tenant=int(names[row])).first_seen for row in rows]
    made = [cold(routings, fleet), Scenario("cold, tenant", fleet, named)]
    if len(again := routings.where(1, sampled=True)):
        made.append(Scenario("cold, sampled", fleet, [request(routings, row).first_seen for row in again]))
    made.extend(_hits(fleet, whole, blocks) for blocks in (4, 8) if blocks < len(whole[0].hashes))
    if len(turns := _turns(routings, rows)):
        talked = fleet.copy()
        for row in rows[~np.isin(rows, turns)]:
            talked.serve(request(routings, row, session=int(routings.document[row]) + 1))
        later = [
            request(routings, row, session=int(routings.document[row]) + 1, tenant=int(names[row]))
            for row in turns
        ]
        made.append(Scenario("next turn", talked, [asked._replace(tenant=0).first_seen for asked in later]))
        made.append(_hits(talked, later, 4, "next turn, tenant, "))
    return made


def cold(routings: Routings, fleet: Fleet) -> Scenario:
    """Return the test requests with nothing known except their prompt."""
    return Scenario("cold", fleet, [request(routings, row).first_seen for row in routings.where(1)])


def _hits(fleet: Fleet, requests: Sequence[Request], blocks: int, name: str = "") -> Scenario:
    """Return requests that continue a prefix created by other, finished requests."""
    warm = fleet.copy()
    for asked in requests:
        warm.leave_prefix(asked.opening(blocks))
    return Scenario(
        f"{name}{blocks} blocks known",
        warm,
        [asked._replace(cached=blocks, hashes=asked.hashes[:blocks]) for asked in requests],
    )


def _turns(routings: Routings, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the last request of each document that has several."""
    last = [
        mine[np.argmax(routings.start[mine])]
        for each in np.unique(routings.document[rows])
        if len(mine := rows[routings.document[rows] == each]) > 1
    ]
    return np.array(last, np.intp)


# Reporting


class Difference(NamedTuple):
    """Quality of the combination minus that of one source, by request (float64 [n], means over seeds);
    positive: the combination is better."""

    scenario: str
    source: str
    recall: Table
    kl: Table


def low_and_high(values: Table, comparisons: int, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over requests; `comparisons` such intervals hold jointly
    (Bonferroni)."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLED, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025 / comparisons, 1 - 0.025 / comparisons))
    return float(low), float(high)


def calibration(scenario: Scenario) -> tuple[float, float, float]:
    """Return the expected calibration error (BINS equally filled bins), the root mean square error and that
    of the mix, for the predicted local share of each request on each rank."""
    everything, _ = scenario.truth()
    placement = scenario.fleet.placement
    profiles = (
        scenario.expected(scenario.weights()[COMBINED]),
        scenario.expected(scenario.weights()[PRIOR]),
        everything / everything.sum(axis=2, keepdims=True),
    )
    said, mix, seen = (
        expected_local_share(each, placement, np.zeros(placement.ranks, np.intp)).ravel() for each in profiles
    )
    bins = np.array_split(np.argsort(said, kind="stable"), BINS)
    error = sum(len(each) * abs(said[each].mean() - seen[each].mean()) for each in bins) / len(said)
    return (
        float(error),
        float(np.sqrt(np.mean((said - seen) ** 2))),
        float(np.sqrt(np.mean((mix - seen) ** 2))),
    )


def _predictions(report: Report, made: Sequence[Sequence[Scenario]]) -> list[Difference]:
    """Add one row per scenario and prediction, means over requests and seeds. `made`: by seed."""
    differences = []
    for same in zip(*made, strict=True):
        found = [scenario.qualities() for scenario in same]
        pooled = {
            name: Quality(
                *(np.mean(parts, axis=0) for parts in zip(*(each[name] for each in found), strict=True))
            )
            for name in found[0]
        }
        for name, each in pooled.items():
            report.add(
                f"{same[0].name}: {name}", *(float(values.mean()) for values in each), len(each.recall_all)
            )
        best = pooled[COMBINED]
        differences += [
            Difference(same[0].name, name, best.recall_all - each.recall_all, each.kl_all - best.kl_all)
            for name, each in pooled.items()
            if name not in (COMBINED, HINDSIGHT)
        ]
    first = next(each for each in differences if (each.scenario, each.source) == ("cold", PRIOR))
    report.targets.append(
        Target("recall over the prior's, cold requests", float(first.recall.mean()), RECALL_GAIN, unit="")
    )
    return differences


def _not_beaten(report: Report, differences: Sequence[Difference]) -> None:
    """Require that no interval of combined minus single lies below 0, wherever one source has a
    prediction."""
    for measure in ("recall", "KL"):
        values = {
            f"{each.scenario}, {each.source}": each.recall if measure == "recall" else each.kl
            for each in differences
        }
        worst = min(values, key=lambda name: low_and_high(values[name], 1)[1])
        low, high = low_and_high(values[worst], 1)
        report.notes.append(
            f"combined less single, {measure}: worst against {worst}: {values[worst].mean():+.4f}, 95 %"
            f" interval {low:+.4f} to {high:+.4f}"
        )
        ends = [low_and_high(each, len(values))[1] for each in values.values()]
        name = (
            f"combined less single, {measure}, upper end of the worst of {len(values)} joint 95 % intervals"
        )
        report.targets.append(Target(name, min(ends), NO_MATTER[measure], unit=""))


def _calibrated(report: Report, made: Sequence[Sequence[Scenario]]) -> None:
    for same in zip(*made, strict=True):
        error, said, mix = np.mean([calibration(scenario) for scenario in same], axis=0)
        report.notes.append(
            f"local share on each of {RANKS} ranks, {same[0].name}: calibration error {error:.4f}, rms error"
            f" {said:.4f} (prior {mix:.4f})"
        )


def _gains(report: Report, recorded: Routings, fleets: Sequence[Fleet], *, quick: bool) -> None:
    """Measure the gain where prediction is useful, and where it is not."""
    loud = [fleet.learning.gain for fleet in fleets]
    quiet = [
        learnt(recorded, recorded.where(0), seed, shuffled=True).learning.gain for seed in range(len(fleets))
    ]
    report.notes.append(
        f"gain after {fleets[0].served} requests: mixed traffic {_listed(loud)}, shuffled signatures"
        f" {_listed(quiet)}"
    )
    report.targets.append(Target("gain on mixed traffic, aligned placement", min(loud), LOUD, unit=""))
    report.targets.append(Target("gain on shuffled signatures", max(quiet), QUIET, at_least=False, unit=""))
    single = {}
    for number in range(0, len(recorded.domains), 4 if quick else 1):
        rows = np.flatnonzero((recorded.domain == number) & ~recorded.sampled)
        single[recorded.domains[number]] = [
            learnt(recorded, rows, seed).learning.gain for seed in range(len(fleets))
        ]
    report.notes.append(
        "gain on traffic of one domain, by order: "
        + "; ".join(f"{name} {_listed(gains)}" for name, gains in single.items())
    )
    highest = max(gain for gains in single.values() for gain in gains)
    report.targets.append(
        Target("gain on traffic of one domain, highest of all", highest, QUIET, at_least=False, unit="")
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _curve(report: Report, recorded: Routings) -> None:
    """Measure the learning curve: cold requests after a part of the training data."""
    rows, found = np.random.default_rng(0).permutation(recorded.where(0)), []
    for part in (16, 8, 4, 2):
        few = rows[: len(rows) // part]
        found.append(
            f"{cold(recorded, learnt(recorded, few, 0)).qualities()[COMBINED].recall_all.mean():.3f} after"
            f" {len(few)}"
        )
    report.notes.append("recall of cold requests: " + ", ".join(found))


def _skills(report: Report, recorded: Routings, trained: Scenario, *, quick: bool) -> None:
    """Compare with the same architecture, never trained, on the same requests."""
    try:
        rows = np.concatenate(
            [recorded.where(0)[:: 3 if quick else 1], recorded.where(1)[:: 3 if quick else 1]]
        )
        control = untrained(recorded, rows)
    except ValueError as error:
        report.notes.append(f"{_way(trained)}; no untrained control: {error}")
        return
    other = cold(control, learnt(control, control.where(0), 0))
    report.notes.append(f"cold requests, trained: {_way(trained)}")
    report.notes.append(f"cold requests, untrained control: {_way(other)}, {len(other.requests)} requests")
    lead = _skill(trained) - _skill(other)
    report.targets.append(
        Target("skill of the trained model over the untrained control's, cold requests", lead, 0.0, unit="")
    )


def _skill(scenario: Scenario) -> float:
    return skill(scenario.expected(scenario.weights()[COMBINED]), scenario.truth()[0])


def _way(scenario: Scenario) -> str:
    found = {
        name: {part: float(values.mean()) for part, values in each._asdict().items()}
        for name, each in scenario.qualities().items()
    }
    way = {
        part: (found[COMBINED][part] - found[PRIOR][part]) / (found[HINDSIGHT][part] - found[PRIOR][part])
        for part in ("recall_all", "kl_all")
    }
    gained = found[COMBINED]["recall_all"] - found[PRIOR]["recall_all"]
    return (
        f"skill {_skill(scenario):.3f} (centred cosine), recall {gained:+.3f} over the prior's, "
        f"of the way from the prior to hindsight {way['recall_all']:.0%} of recall, {way['kl_all']:.0%} of KL"
    )


def main(
    routings: Path = File,
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    seeds: int = Seeds,
) -> None:
    """Learn, predict, compare."""
    recorded = load(routings)
    report = Report(
        "Prediction of experts",
        ["requests / prediction", "recall all", "completion", "KL all", "completion", "n"],
    )
    seeds = 1 if quick else seeds
    fleets = [learnt(recorded, recorded.where(0), seed) for seed in range(seeds)]
    made = [scenarios(recorded, fleet, seed) for seed, fleet in enumerate(fleets)]
    differences = _predictions(report, made)
    _not_beaten(report, differences)
    _calibrated(report, made)
    _curve(report, recorded)
    _gains(report, recorded, fleets, quick=quick)
    _skills(report, recorded, made[0][0], quick=quick)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
