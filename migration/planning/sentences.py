"""Sentences for the findings, steps and recoveries of a planning run. Pure."""

from collections.abc import Callable, Sequence

from fleet.layout import ATTENTION_NAMES
from fleet.placement import EMPTY
from fleet.text import byte_size, counted, duration, listed
from migration.layouts.hot_layers import LayerGain
from migration.model.placement_changes import ChangeKind
from migration.model.plan import PlanStep
from migration.planning.findings import Finding, FindingCode
from migration.planning.rank_loss import Recovery
from migration.solvers.specialisation_test import FEW, LEAST, Evidence, SpecialisationTest

MOST_LAYERS = 3
"""Layers of a set that a sentence names."""
NEW_SHARES = "its replicas get new shares, which evens out the ranks and copies nothing"


def sentence(finding: Finding) -> str:
    """Return a finding as a sentence, after the subject that it is about."""
    text = TEXTS[finding.code]
    found = text.format(**finding.values) if isinstance(text, str) else text(**finding.values)
    return f"{finding.about}: {found}" if finding.about else found


# Findings


def _outcome(
    copies: int,
    bytes: int,
    balance: tuple[float, float],
    local: tuple[float, float],
    gain_seconds: float,
    net_seconds: float,
    lifetime_seconds: float,
) -> str:
    copied = f"{counted(copies, 'copy', 'copies')}, {byte_size(bytes)}" if copies else "no bytes"
    length = "shorter" if gain_seconds >= 0 else "longer"
    return (
        f"{copied}; balance {balance[0]:.3f} to {balance[1]:.3f}, local {local[0]:.1%} to {local[1]:.1%},"
        f" a step {duration(abs(gain_seconds))} {length}; net gain {net_seconds:.3g} s in"
        f" {lifetime_seconds:.0f} s"
    )


def _gains_no_more(gain: float, best: str, best_gain: float, least_gain: float) -> str:
    small = "" if gain <= best_gain else f": the difference is less than {least_gain:.2%} of a step"
    return f"gains {duration(gain)} per step, {best} {duration(best_gain)}{small}"


def _costs_more(gain: float, best: str, best_gain: float) -> str:
    return (
        f"gains {duration(gain)} per step, {best} {duration(best_gain)}: its copies cost more time than that"
        " is worth"
    )


def _small_at_most(gain: float) -> str:
    return f"gains at most {duration(gain)} per step within the budget"


def _copies_outweigh(gain: float, copies: int) -> str:
    return f"gains at most {duration(gain)} per step with {copies:,} copies: too little for their number"


def _ranks_lost(dead: tuple[int, ...], recovery: Recovery) -> str:
    return f"without {'rank' if len(dead) == 1 else 'ranks'} {listed(dead)}: {recovery_summary(recovery)}"


def _reach_home(part: float, seen: bool) -> str:
    source = "as observed" if seen else "an expectation before any observation"
    return f"{part:.0%} of the requests reach their home, {source}"


def _specialisation(test: SpecialisationTest, of: str) -> str:
    if test.evidence is Evidence.TOO_FEW_PAIRS:
        return (
            f"insufficient data: {test.mean_pairs:.0f} pairs per layer from each of {test.sources} {of},"
            f" {FEW * test.experts:.0f} from two are needed"
        )
    measured = (
        f"demand of {test.sources} {of} diverges by {test.divergence:.4f} nats, noise alone by"
        f" {test.floor:.4f} +- {test.spread:.4f}"
    )
    if test.evidence is Evidence.TOO_SMALL:
        return f"too little specialisation: {measured}; {LEAST:g} beyond it are needed"
    return f"{'specialised' if test.specialised else 'no specialisation'}: {measured}"


def _layers_turn(gains: Sequence[LayerGain], bytes: int, net_seconds: float, lifetime_seconds: float) -> str:
    more = f"; and {len(gains) - MOST_LAYERS} more layers" if len(gains) > MOST_LAYERS else ""
    named = "; ".join(map(str, gains[:MOST_LAYERS]))
    return f"{named}{more}; {byte_size(bytes)}, net gain {net_seconds:.3g} s in {lifetime_seconds:.0f} s"


def _layers_equal(gain: LayerGain | None, least: float, resting: tuple[int, ...]) -> str:
    nearest = "" if gain is None else f"; nearest: {gain}"
    rest = f"; {listed(resting)} turned over a short time ago, and rest" if resting else ""
    return f"none gains the {duration(least)} of a step that its change must{nearest}{rest}"


def _layers_do_not_pay(gains: Sequence[LayerGain], net_seconds: float, least_seconds: float) -> str:
    named = "; ".join(map(str, gains[:MOST_LAYERS]))
    return f"{named}; net gain {net_seconds:.3g} s, and {least_seconds:.3g} s is the least"


def _layers_gain_no_more(
    gains: Sequence[LayerGain], net_seconds: float, best: str, best_seconds: float
) -> str:
    named = "; ".join(map(str, gains[:MOST_LAYERS]))
    return f"{named}; net gain {net_seconds:.3g} s, and {best} gains {best_seconds:.3g} s"


_NO_NOISE = "no gain beyond sampling noise"
TEXTS: dict[FindingCode, str | Callable[..., str]] = {
    FindingCode.SHARDED: (
        "experts are sharded over all ranks in this layout: no placement is better than another"
    ),
    FindingCode.TOO_FEW_PAIRS: "insufficient data: {seen:,.0f} of {needed:,.0f} required pairs per layer",
    FindingCode.ONE_WINDOW: (
        "only one window of demand so far: plans are judged on the window they are fitted to, which"
        " overestimates gains"
    ),
    FindingCode.NO_PAIR_TIME: (
        "the engine reports no compute time per pair (expert_pair 0): even loads save it nothing"
    ),
    FindingCode.CACHE_UNKNOWN: (
        "the value of further slots is unknown: the engine does not report the size or the use of its KV"
        " blocks"
    ),
    FindingCode.AT_CEILING: f"{_NO_NOISE}: loads are as even as the few tokens of a step allow",
    FindingCode.BELOW_LEAST_GAIN: _NO_NOISE + ": no plan makes a step shorter by {least_gain:.2%} of a step",
    FindingCode.DOES_NOT_PAY: (
        "nothing pays for itself in the {lifetime_seconds:.0f} s that the demand is expected to last"
    ),
    FindingCode.POLICY_UNABLE: "the policy {policy} cannot plan for this engine",
    FindingCode.OUTCOME: _outcome,
    FindingCode.TOO_MANY_COPIES: "that is too little for its number of copies",
    FindingCode.COPIES_OUTWEIGH: _copies_outweigh,
    FindingCode.GAINS_NO_MORE: _gains_no_more,
    FindingCode.COSTS_MORE: _costs_more,
    FindingCode.NOT_NEEDED: (
        "not needed, {best} reaches {part:.1%} of what it would gain (enough is {target:.0%})"
    ),
    FindingCode.SMALL_AT_MOST: _small_at_most,
    FindingCode.IMPOSSIBLE: "{error}",
    FindingCode.CHOSEN: "{name} gains most for its cost",
    FindingCode.LAYERS_TURN: _layers_turn,
    FindingCode.LAYERS_EQUAL: _layers_equal,
    FindingCode.LAYERS_AT_HALF: (
        "{gain}; but half of the layers are the most that are sharded one by one, and more are a matter of"
        " the layout as a whole"
    ),
    FindingCode.LAYERS_BEYOND_BUDGET: (
        "{gain}; the change copies {size}, and the byte budget has {left} left: planner.budget_bytes"
    ),
    FindingCode.LAYERS_DO_NOT_PAY: _layers_do_not_pay,
    FindingCode.LAYERS_GAIN_NO_MORE: _layers_gain_no_more,
    FindingCode.RANKS_LOST: _ranks_lost,
    FindingCode.CRITICAL: (
        "{part:.0%} of the experts, those of most demand, must survive the loss of a rank"
    ),
    FindingCode.CRITICAL_UNABLE: (
        "some experts that must survive the loss of a rank have no second replica: {error}"
    ),
    FindingCode.CHEAP_DISPATCH: (
        "it would save next to nothing, as sending tokens takes hardly any time on this engine"
    ),
    FindingCode.FOLLOWS_HOMES: "requests have homes, and experts go where the homes are",
    FindingCode.SPECIALISATION: _specialisation,
    FindingCode.TOO_ALIKE: "ranks' requests differ by too little in the next window",
    FindingCode.NO_CLUSTERS: "the tracker has no clusters of requests yet",
    FindingCode.OTHER_CLUSTERS: "the tracker's clusters are of another shape: {shape}",
    FindingCode.UNPREDICTABLE: (
        "the demand of requests cannot be predicted yet, so none could be sent to a home"
    ),
    FindingCode.SINGLE_CLUSTER: "a single cluster needs no home",
    FindingCode.REACH_HOME: _reach_home,
    FindingCode.HOMES_SAVE_TOO_LITTLE: (
        "homes would save {saved:.1f} % of dispatch, the same placement without them {without:.1f} %"
    ),
    FindingCode.PRESENT_HOMES_SAVE: (
        "the present homes save {kept:.1%} of dispatch, {without:.1%} without them"
    ),
    FindingCode.HOMES_SAVE_HERE: (
        "homes save {saved:.1%} of dispatch under this placement, {without:.1%} without them"
    ),
    FindingCode.HOMES_AND_PLACEMENT_SMALL: (
        "homes and placement would save less than {least:.0%} of what sending tokens takes"
    ),
    FindingCode.POLICY_WITHOUT_HOMES: "the policy {policy} assigns no homes",
    FindingCode.UNTIL_LAST_HANDOVER: "they stay until the plan's last handover",
    FindingCode.WITH_THE_PLACEMENT: "they go with the placement that the plan leads to",
}
"""Text of each code: a template of its values, or a function of them."""


def recovery_summary(way: Recovery) -> str:
    """Describe a recovery in a sentence or two."""
    lost, worst = len(way.lost), int(way.missing.argmax())
    parts = ["every expert has a live holder"]
    if lost:
        layers = len(set(way.lost[:, 0].tolist()))
        parts = [f"{lost} experts of {layers} layers have no live holder"]
    if not way.possible:
        parts.append(
            f"the survivors lack {way.missing.sum()} slots, {way.missing[worst]} of them in layer {worst}"
        )
        parts.append("bring ranks back, or give them more slots")
    elif lost:
        parts.append("all of them are loaded from storage")
    if len(way.short):
        parts.append(f"{len(way.short)} have fewer holders than they must")
    return "; ".join(parts)


# Steps


def step_text(step: PlanStep, per: int) -> str:
    """Describe the expert that a step moves, and between which ranks; or what else it changes. per: slots of
    a rank."""
    if step.attention is not None:
        return f"attention becomes {ATTENTION_NAMES[step.attention]}"
    if step.turns:
        return "becomes sharded" if step.kind == "shard" else "becomes whole"
    if step.kind == "reweight" or step.slot is None:
        return "new shares"
    to = f"rank {step.slot // per}"
    if step.kind == "drop":
        return f"expert {step.expert} leaves {to}"
    if step.kind == "swap" and step.other_slot is not None:
        return f"expert {step.expert} of rank {step.other_slot // per} for {step.other_expert} of {to}"
    instead = "" if step.evicted is None else f" instead of {step.evicted}"
    source = next((copy.source for copy in step.copies if copy.slot == step.slot), None)
    origin = "storage" if source is None else f"rank {source // per}"
    return f"expert {step.expert} from {origin} to {to}{instead}" + (
        ", where it leaves" if step.kind == "move" and source is not None else ""
    )


def change_reason(
    kind: ChangeKind, replicas: list[int], replaced: int, expert: int, lost_source: int | None = None
) -> str:
    """Return the reason for a change that the tables show, short enough for one line.

    replicas: of the layer's experts, before the change. replaced: expert in the slot until then, or EMPTY.
    lost_source: the dead rank that a move starts from.
    """
    if kind == ChangeKind.DROP:
        return f"also held by {counted(replicas[replaced] - 1, 'rank')}"
    if kind == ChangeKind.SWAP:
        return "ranks are more even, or experts nearer to their requests"
    room = (
        "into an empty slot"
        if replaced == EMPTY
        else f"{replaced} is held by {counted(replicas[replaced], 'rank')}"
    )
    if kind == ChangeKind.REPLICATE:
        return f"held by {counted(replicas[expert], 'rank')} so far, {room}"
    if lost_source is not None:
        return f"rank {lost_source} is lost, {room}"
    return f"more even ranks or nearer experts, {room}"
