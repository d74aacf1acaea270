"""Routing decisions as text: queried from a router, before a request is run or after it was served."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from deploy.terminal.output import USAGE, console, fail, table
from router.prediction.predictor import PredictionRecord
from router.scheduling.cost import TERMS
from router.scheduling.decision_record import Candidate, DecisionRecord, PrefillRecord

ASK_SECONDS = 30.0
TRY_SECONDS = 2.0
MAX_SHOWN = 16
"""Most candidates printed, lowest scores first; the JSON has all."""
MIN_SHOWN_WEIGHT = 0.005
SHOWN_LAYERS = 4
"""Layers whose likely experts are listed."""
"""Smallest cluster weight that is printed."""
HEAD = (
    "",
    "rank",
    *(f"{term} ms" for term in TERMS),
    "= score ms",
    "cached blocks",
    "uncached tokens",
    "local experts",
    "outstanding",
)
SCORE = HEAD.index("= score ms")
NOT_MEASURED = "?"
WHYS = {
    "cheapest": "the lowest score",
    "tie": "drawn among the {tied} ranks of the lowest score, by seed {seed}",
    "home": "its experts' home is there, and that is worth the rank's extra cost, if any",
    "session": "the session stays on its rank",
    "temperature": "drawn by temperature, by seed {seed}",
    "only": "the only candidate",
}


class RouterAddress:
    """HTTP client for a router; ends the command with the router's error when it refuses."""

    def __init__(self, url: str, key: str | None, ca: Path | None = None) -> None:
        """Create the client. ca: PEM file of certificate authorities for an https:// router, instead of the
        system's; ends the command if it is unusable."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
        }
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if ca is not None:
            try:
                handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
            except OSError as error:
                fail(f"--ca {ca}: {error}", USAGE)
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def url(self) -> str:
        """Return the base URL of the router."""
        return self._url

    def try_get(self, path: str) -> bytes | None:
        """Return the body of a page; None if no router answers quickly, or it refuses."""
        try:
            with self._opener.open(
                urllib.request.Request(self._url + path, headers=self._headers), timeout=TRY_SECONDS
            ) as answer:
                content: bytes = answer.read()
                return content
        except (OSError, ValueError):
            return None

    def first_model(self) -> str:
        """Return the first model that the router lists."""
        models = json.loads(self.get("/v1/models"))["data"]
        if not models:
            fail(f"the router at {self._url} serves no model yet; `roost status` shows the engines")
        return str(models[0]["id"])

    def get(self, path: str) -> bytes:
        """Return the body of a page."""
        return self._ask(urllib.request.Request(self._url + path, headers=self._headers))

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
        """Return the answer to a JSON body."""
        return self._ask(
            urllib.request.Request(self._url + path, json.dumps(body).encode(), self._headers | headers)
        )

    def _ask(self, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=ASK_SECONDS) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            fail(f"the router at {self._url} answers {error.code}: {_reason(error.read())}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            fail(
                f"no router at {self._url}: {getattr(reason, 'strerror', None) or reason}; name it with"
                " --router URL"
            )


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")


def show_decision(answer: bytes) -> None:
    out, record = console(), msgspec.json.decode(answer, type=DecisionRecord)
    out.print(
        f"decision {record.id}: [bold]{record.chosen}[/bold] for {record.model}, {record.prompt_tokens}"
        f" prompt tokens, {record.expected_output_tokens} expected"
    )
    if record.prefill is not None:
        out.print(_prefill_line(record.prefill))
    if record.supposed is not None:
        without = [f"{term} does not count" for term in record.supposed.without]
        gone = [f"{name} is gone" for name in record.supposed.gone]
        out.print(f"supposed: {', '.join([*without, *gone])}")
    unmeasured = [f"{one.engine}/{one.rank}" for one in record.candidates if one.speed == "not measured"]
    score = f"{record.policy} score" if record.policy != "cost" else "score" if unmeasured else HEAD[SCORE]
    table(
        (*HEAD[:SCORE], score, *HEAD[SCORE + 1 :]),
        (_row(record, candidate) for candidate in record.candidates[:MAX_SHOWN]),
    )
    if len(record.candidates) > MAX_SHOWN:
        out.print(f"and {len(record.candidates) - MAX_SHOWN} more with higher scores; --json has them all")
    if unmeasured:
        names = ", ".join(unmeasured)
        out.print(
            f"not measured ({NOT_MEASURED}): some speed of {names}; until streams show it, scores compare and"
            " are no times"
        )
    out.print(f"why: {WHYS[record.why].format(tied=record.tied, seed=record.seed)}; policy {record.policy}")
    if record.home_ranks:
        out.print(
            "home ranks:"
            f" {', '.join(record.home_ranks)}{'' if record.homes_note is None else f'; {record.homes_note}'}"
        )
    if record.margin is not None:
        out.print(
            f"margin over {record.runner_up}: {record.margin:.3f} {record.unit.replace('1', '')}".rstrip()
        )
    _show_what_if(record)
    for excluded in record.excluded:
        out.print(f"excluded: {excluded.engine}/{excluded.rank}: {excluded.reason}")
    for ignored in record.ignored:
        out.print(
            f"ignored, because no other rank was left: {ignored.engine}/{ignored.rank}: {ignored.reason}"
        )
    if record.prediction is not None:
        _show_prediction(record.prediction)
    for note in dict.fromkeys(
        candidate.experts_note for candidate in record.candidates if candidate.experts_note
    ):
        out.print(f"experts: {note}")
    placements = ", ".join(
        f"{engine} {epoch if epoch is not None else '-'}" for engine, epoch in record.epochs.placement.items()
    )
    tables, clusters = (
        "-" if version is None else version for version in (record.epochs.tables, record.epochs.clusters)
    )
    out.print(
        f"epochs: placement {placements}; tables {tables}; clusters {clusters}; view {record.epochs.view}"
    )
    if record.replaces is not None:
        out.print(
            f"attempt {record.attempt}, in the place of decision {record.replaces}, which failed:"
            f" {record.cause}"
        )


def _prefill_line(prefill: PrefillRecord) -> str:
    """Return the sentence on the worker that computed the prompt before."""
    by = "" if prefill.decision is None else f"{prefill.decision.chosen} (decision {prefill.decision.id})"
    if prefill.failure is not None:
        tried = f", tried last at {by}" if by else ""
        return f"prefill: none{tried}: {prefill.failure}; the rank computes the prompt itself"
    known = f", which reported the experts of {prefill.activated_tokens} tokens"
    return f"prefill: by {by}{known if prefill.activated_tokens else ''}; the rank fetches its KV"


def _show_what_if(record: DecisionRecord) -> None:
    """Print the choice under each single change."""
    changes = ", ".join(
        f"{name} without {term}" for term, name in record.without.items() if name != record.chosen
    )
    if record.without:
        console().print(f"otherwise: {changes or 'the same rank without any one term'}")
    if record.if_gone is not None:
        console().print(f"if {record.chosen} were gone: {record.if_gone}")


def _show_prediction(prediction: PredictionRecord) -> None:
    """Print the predicted clusters, their sources and evidence, and the current weight of the prediction."""
    out = console()
    clusters = ", ".join(
        f"cluster {one.cluster}: {one.weight:.0%}"
        for one in prediction.clusters
        if one.weight >= MIN_SHOWN_WEIGHT
    )
    worth = f"confidence {prediction.confidence:.2f}, gain {prediction.gain:.2f}"
    out.print(
        f"predicted: {clusters or 'all clusters alike'}; {worth}; {prediction.known_blocks} blocks of the"
        " prompt known"
    )
    for source in prediction.sources:
        out.print(
            f"  {source.source}: {source.evidence_tokens:g} tokens of evidence, confidence"
            f" {source.confidence:.2f}"
        )
    for one in prediction.experts[:SHOWN_LAYERS]:
        likely = ", ".join(
            f"{expert} {share:.0%}" for expert, share in zip(one.experts, one.shares, strict=True)
        )
        out.print(f"  layer {one.layer}: experts {likely}")
    if len(prediction.experts) > SHOWN_LAYERS:
        out.print(f"  ... and {len(prediction.experts) - SHOWN_LAYERS} further layers (--json shows all)")
    if not prediction.sources:
        out.print("  no information about this request: the average of the traffic is assumed")


def _row(record: DecisionRecord, candidate: Candidate) -> tuple[str, ...]:
    name = f"{candidate.engine}/{candidate.rank}"
    mark = "chosen" if name == record.chosen else "runner-up" if name == record.runner_up else ""
    terms = (
        NOT_MEASURED if (value := getattr(candidate.terms_ms, term)) is None else f"{value:.3f}"
        for term in TERMS
    )
    blocks = f"{'~' * candidate.overlap_approximate}{candidate.overlap_blocks}"
    local = "-" if candidate.local_share is None else f"{candidate.local_share:.1%}"
    outstanding = f"{candidate.load.requests} requests, {candidate.load.prefill_tokens} tokens"
    return (
        mark,
        name,
        *terms,
        f"{candidate.score:.3f}",
        blocks,
        str(candidate.uncached_tokens),
        local,
        outstanding,
    )
