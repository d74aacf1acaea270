"""Expert popularity, demand and prediction quality: from the tracker, or from a file of another system."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus import Bus
from bus.config import BusConfig
from bus.protocol.subjects import Subjects
from deploy.client.placements import Placements, placements
from deploy.terminal.bus_connection import on_bus
from deploy.terminal.drawing import drawer, named
from deploy.terminal.output import USAGE, console, fail, in_json, note, show, table
from deploy.terminal.panels import Panel, Rows, demand_panels
from fleet.arrays import FloatingArray
from fleet.experts import ModelShape
from fleet.facts.activity import CountsImported
from fleet.facts.demand import DemandPublished
from fleet.facts.engines import EngineJoined
from fleet.popularity import ExpertCounts
from fleet.requests.demand import DescribePopularity, PopularityDescribed, RankPopularity
from fleet.text import counted
from tracker.importers.load_files import ExpertLoads, read_load

HOTTEST = 6
"""Experts named per layer, and per list of a rank."""
DEMAND_SECONDS = 3.0
"""Listening time; longer than the interval in which the tracker publishes demands."""
ASK_SECONDS = 5.0
TAKEN_LOOKS, TAKEN_SECONDS = 5, 0.2
"""Number of checks, and the pause before each, until the tracker has imported a file."""


class LayerSkew(msgspec.Struct, frozen=True):
    """Popularity skew of one layer. entropy: 1 is even, 0 is one expert alone; top_tenth: share of the most
    popular tenth."""

    layer: int
    max_over_mean: float
    entropy: float
    top_tenth: float
    hottest: tuple[tuple[int, float], ...]
    """(expert, share), largest first"""


def skew(profile: FloatingArray) -> tuple[LayerSkew, ...]:
    """Return the skew of each layer of a table of counts or probabilities; empty layers count as even."""
    experts = profile.shape[1]
    sums = profile.sum(axis=1, keepdims=True)
    shares = np.where(
        sums > 0, np.divide(profile, sums, out=np.zeros(profile.shape), where=sums > 0), 1.0 / experts
    )
    order = np.argsort(-shares, axis=1, kind="stable")
    falling = np.take_along_axis(shares, order, axis=1)
    logs = np.log(falling, out=np.zeros_like(falling), where=falling > 0)
    entropy = -(falling * logs).sum(axis=1) / np.log(experts) if experts > 1 else np.ones(len(shares))
    tenth = falling[:, : -(-experts // 10)].sum(axis=1)
    return tuple(
        LayerSkew(
            layer,
            float(experts * falling[layer, 0]),
            float(entropy[layer]),
            float(tenth[layer]),
            tuple(
                (int(expert), float(share))
                for expert, share in zip(order[layer, :HOTTEST], falling[layer, :HOTTEST], strict=True)
            ),
        )
        for layer in range(len(shares))
    )


# From the tracker


def show_popularity(bus_config: BusConfig, model: str | None, plot: Path | None, *, as_json: bool) -> None:
    """Print everything about one model; by default the only one that is served.

    plot: file of the picture; the demand of an engine's ranks has a picture of its own.
    """
    draw = None if plot is None else drawer()

    async def ask(
        bus: Bus, subjects: Subjects
    ) -> tuple[PopularityDescribed, dict[tuple[str, int], FloatingArray], dict[str, Placements]]:
        answer = await describe(bus, subjects, model)
        if draw is None:
            return answer, {}, {}
        return answer, await demands(bus, subjects, answer), await placements(bus, subjects)

    described, demand, found = on_bus(bus_config, ask)
    if as_json:
        show(in_json(as_record(described)))
    else:
        print_popularity(described)
    if draw is None or plot is None:
        return
    draw(plot, panels(described.slow.array(), described.fast.array()), described.model)
    note(f"drew {plot}")
    pictures = rank_panels(described.model, demand, found)
    for engine, (title, rows) in pictures.items():
        file = named(plot, engine, several=True)
        draw(file, rows, title)
        note(f"drew {file}: which rank demands which experts")
    if not pictures:
        note("no rank reports demand at present, so there is no picture of demand by rank")


async def describe(bus: Bus, subjects: Subjects, model: str | None) -> PopularityDescribed:
    """Return the tracker's answer. Raises BusError if it does not answer or does not know the model."""
    if model is None:
        names = sorted({joined.model for joined in await _joined(bus, subjects)})
        if len(names) != 1:
            fail(
                (
                    f"name a model with --model; served are: {', '.join(names)}"
                    if names
                    else "no engine has joined; start one, or name a model with --model"
                ),
                USAGE,
            )
        model = names[0]
    answer = await bus.request(
        subjects.describe_profile, DescribePopularity(model=model), seconds=ASK_SECONDS
    )
    if not isinstance(answer, PopularityDescribed):
        fail(f"the tracker answered with {type(answer).__name__}; is it of another version of Roost?")
    return answer


async def _joined(bus: Bus, subjects: Subjects) -> list[EngineJoined]:
    """Return the engines whose last event is a join."""
    last = {
        received.subject: received.message
        async for received in bus.replay(subjects.membership(), latest=True, follow=False)
    }
    return [message for message in last.values() if isinstance(message, EngineJoined)]


async def demands(
    bus: Bus, subjects: Subjects, described: PopularityDescribed
) -> dict[tuple[str, int], FloatingArray]:
    """Return demand [layers, experts] by engine and rank, as published within DEMAND_SECONDS; ranks without a
    message are missing."""
    waited = {(rank.engine, rank.rank) for rank in described.ranks if rank.tokens_per_second > 0}
    found: dict[tuple[str, int], FloatingArray] = {}
    async with bus.subscribe(subjects.demand) as reports:
        with suppress(TimeoutError):  # ranks without a message are omitted from the picture
            async with asyncio.timeout(DEMAND_SECONDS):
                async for received in reports:
                    match received.message:
                        case DemandPublished() as demand if demand.model == described.model:
                            found[demand.engine, demand.rank] = demand.demand.array()
                    if waited <= found.keys():
                        break
    return dict(sorted(found.items()))


def as_record(described: PopularityDescribed) -> dict[str, Any]:
    """Return a record for programs: tables as skew and hottest experts, all other fields unchanged."""
    record: dict[str, Any] = {
        name: getattr(described, name) for name in described.__struct_fields__ if name not in ("fast", "slow")
    }
    return {**record, "layers": skew(described.slow.array()), "recent": skew(described.fast.array())}


def print_popularity(described: PopularityDescribed) -> None:
    """Print the popularity for people."""
    out = console()
    out.print(
        f"[bold]{described.model}[/bold]: {described.tokens:,.0f} tokens remembered,"
        f" {described.tokens_per_second:,.1f} tokens/s now; {_drift(described)}"
    )
    _print_skew(described.slow.array())
    out.print("")
    if described.ranks:
        table(
            ("rank", "tokens/s", "remote", "demanded but remote (layer/expert tokens/s)", "held but idle"),
            map(_rank_row, described.ranks),
        )
    else:
        out.print("no rank has reported")
    out.print("")
    known = [cluster for cluster in described.clusters if cluster.share > 0]
    shares = ", ".join(
        f"{cluster.cluster}: {cluster.share:.1%} ({cluster.distance:.3f})"
        for cluster in sorted(known, key=lambda one: -one.share)
    )
    out.print(
        f"{len(known)} clusters of requests, by share (nats from the mix): {shares}"
        if known
        else "no clusters yet"
    )
    _print_prediction(described)


def _drift(described: PopularityDescribed) -> str:
    if described.divergence is None or described.threshold is None:
        measured = "too little was seen to tell a change from noise"
    else:
        measured = (
            f"now differs from before by {described.divergence:.5f} nats (a shift: above"
            f" {described.threshold:.5f})"
        )
    return f"{measured}; {'[bold]shifted[/bold], and not stable yet' if described.shifted else 'no shift'}"


def _print_skew(profile: FloatingArray) -> None:
    head = ("layer", "max/mean", "entropy", "top tenth", "hottest experts")
    table(
        head,
        (
            (
                str(one.layer),
                f"{one.max_over_mean:.2f}",
                f"{one.entropy:.3f}",
                f"{one.top_tenth:.1%}",
                _hottest(one),
            )
            for one in skew(profile)
        ),
    )


def _hottest(one: LayerSkew) -> str:
    return ", ".join(f"{expert} {share:.1%}" for expert, share in one.hottest)


def _rank_row(rank: RankPopularity) -> tuple[str, ...]:
    remote = "-" if rank.remote is None else f"{rank.remote:.1%}"
    return (
        f"{rank.engine}/{rank.rank}",
        f"{rank.tokens_per_second:,.1f}",
        remote,
        _experts(rank.wanted_remote),
        _experts(rank.local_idle),
    )


def _experts(found: Sequence[tuple[int, int, float]]) -> str:
    return ", ".join(f"{layer}/{expert} {rate:.1f}" for layer, expert, rate in found[:HOTTEST]) or "-"


def _print_prediction(described: PopularityDescribed) -> None:
    out = console()
    recall = (
        ""
        if described.recall is None
        else f"; recall {described.recall:.3f}"
        + ("" if described.prior_recall is None else f" (the mix alone: {described.prior_recall:.3f})")
    )
    out.print(f"prediction: gain {described.gain:.2f} after {described.outcomes:,} requests compared{recall}")
    if described.sources:
        rows = (
            (one.source, f"{one.requests:,}", f"{one.trust:.2f}", f"{one.reliability:.2f}")
            for one in described.sources
        )
        table(("source", "requests", "weight", "reliability"), rows)
    out.print(f"remembered: {described.stored_blocks:,} prefixes, {described.stored_bytes:,} bytes")


# From a file


def show_load(file: Path, plot: Path | None, *, as_json: bool) -> None:
    """Print skew and hottest experts of a dump; needs no fleet."""
    draw = None if plot is None else drawer()
    load, _ = loaded(file)
    shape = {
        "layers": load.layers,
        "experts": load.experts,
        "steps": load.steps,
        "empty_layers": load.empty_layers,
        "top_k": load.top_k,
    }
    if as_json:
        show(
            in_json(
                {
                    "file": str(file),
                    "form": load.form,
                    "whole": load.is_counts,
                    **shape,
                    "skew": skew(load.counts),
                }
            )
        )
    else:
        left_out = f", {load.empty_layers} layers without any left out" if load.empty_layers else ""
        amount = f"{load.counts.sum():,.0f} (token, k) pairs" if load.is_counts else "proportions"
        console().print(
            f"[bold]{file}[/bold]: {load.form}; {load.layers} layers x {load.experts} experts,"
            f" {counted(load.steps, 'step')}, {amount}{left_out}"
        )
        _print_skew(load.counts)
    if draw is not None and plot is not None:
        draw(plot, panels(load.counts / load.counts.sum(axis=1, keepdims=True)), str(file))
        note(f"drew {plot}")


def learn_load(bus_config: BusConfig, file: Path, model: str, top_k: int | None, tokens: int | None) -> None:
    """Publish the content of a file on the bus, for the tracker to add to a model's profile once."""
    load, digest = loaded(file)

    async def publish(bus: Bus, subjects: Subjects) -> tuple[CountsImported, float, float]:
        return await learn(bus, subjects, load, digest, model, top_k, tokens)

    imported, before, after = on_bus(bus_config, publish)
    sent = (
        f"sent to the tracker: {imported.tokens:,} tokens of {imported.counts.layers} layers x"
        f" {imported.counts.experts} experts for {model}"
    )
    if after > before:
        note(f"{sent}; its profile now weighs {after:,.0f} tokens, {before:,.0f} before")
    else:
        note(f"{sent}; not imported: it already knew this file (a file counts once)")


async def learn(
    bus: Bus,
    subjects: Subjects,
    load: ExpertLoads,
    digest: str,
    model: str,
    top_k: int | None,
    tokens: int | None,
) -> tuple[CountsImported, float, float]:
    """Publish a load. Returns it, and the tracker's token weight before and after. Ends the command if the
    load does not fit the model."""
    described = await describe(bus, subjects, model)
    if (described.slow.layers, described.slow.experts) != (load.layers, load.experts):
        known = f"{described.slow.layers} layers x {described.slow.experts} experts"
        fail(
            f"the file has {load.layers} layers x {load.experts} experts in use, model {model!r} has {known};"
            " is it of another model, or by physical slot?"
        )
    shape = next(
        (
            joined.shape
            for joined in await _joined(bus, subjects)
            if joined.model == model and joined.shape is not None
        ),
        None,
    )
    counted, counts = _pairs(load, _experts_per_token(load, shape, top_k), tokens)
    imported = CountsImported(model=model, digest=digest, tokens=counted, counts=ExpertCounts.of(counts))
    await bus.publisher(subjects.imports).publish(imported)
    after = described
    for _ in range(TAKEN_LOOKS):
        await asyncio.sleep(TAKEN_SECONDS)
        after = await describe(bus, subjects, model)
        if after.tokens > described.tokens:
            break
    return imported, described.tokens, after.tokens


def _experts_per_token(load: ExpertLoads, shape: ModelShape | None, top_k: int | None) -> int:
    """Return the experts per token: as given, as the engines report, or as in the file."""
    found = top_k or (None if shape is None else shape.top_k) or load.top_k
    if found is None:
        fail("how many experts a token uses is not known: name it with --top-k", USAGE)
    return found


def _pairs(load: ExpertLoads, top_k: int, tokens: int | None) -> tuple[int, NDArray[np.int64]]:
    try:
        return load.pairs(top_k, tokens)
    except ValueError as error:
        fail(f"{error} with --tokens", USAGE)


def loaded(file: Path) -> tuple[ExpertLoads, str]:
    """Return a file's load and the sha256 of its content; end the command if it cannot be read."""
    try:
        content = file.read_bytes()
        return read_load(str(file), content), hashlib.sha256(content).hexdigest()
    except (OSError, ValueError) as error:
        fail(str(error), USAGE)


def panels(slow: FloatingArray, fast: FloatingArray | None = None) -> Rows:
    """Return panels of probabilities [layers, experts], relative to even shares: the long-term average, and
    the current difference."""
    experts = slow.shape[1]
    rows: Rows = [(Panel("demand over the last minutes, times the even share", slow * experts),)]
    if fast is not None:
        rows.append((Panel("now minus before, in even shares", (fast - slow) * experts, "signed"),))
    return rows


def rank_panels(
    model: str, demand: Mapping[tuple[str, int], FloatingArray], found: Mapping[str, Placements]
) -> dict[str, tuple[str, Rows]]:
    """Return by engine: a title, and panels of each rank's demand per expert, under the first placement of
    its incarnation and the current one."""
    pictures = {}
    for engine, one in found.items():
        reports = {
            rank: table for (name, rank), table in demand.items() if name == engine and rank < one.now.ranks
        }
        shape = (one.now.layers, one.now.experts)
        if (
            one.joined.model != model
            or not reports
            or any(table.shape != shape for table in reports.values())
        ):
            continue
        demand_of_ranks = np.stack([reports.get(rank, np.zeros(shape)) for rank in range(one.now.ranks)])
        times = [(f"epoch {one.now.epoch}, now", one.now)]
        if one.first is not None and not one.first.serves_as(one.now):
            times.insert(0, (f"epoch {one.first.epoch}, at the start", one.first))
        title = f"{engine}: demand of each rank, in even shares; dots: experts that the rank holds"
        pictures[engine] = (title, demand_panels(demand_of_ranks, times, one.node))
    return pictures
