"""Quality of the demo model and its routing skew: the figures of the model card.

    python -m benchmarks.demo_model.evaluate

An untrained router is strongly skewed too, because of its frozen geometry; it predicts itself well without
learning anything. Every figure of skew is therefore printed beside that of an untrained control. Two figures
count: the gain over the prior that all domains share, and the extra similarity of requests of one domain over
requests of two domains.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from transformers import Qwen3MoeForCausalLM

from benchmarks.demo_model import DOMAINS, routings_path
from benchmarks.demo_model.architecture import build_model, load_model, set_expert_kernel
from benchmarks.demo_model.corpus import Document
from benchmarks.demo_model.heldout import read_documents
from benchmarks.demo_model.record_routings import chosen_experts
from deploy.demo_model import CONTEXT_LENGTH, checkpoint_path
from fleet.arrays import FloatArray

__all__ = ["RoutingSkew", "control_model", "losses_by_domain", "losses_by_position", "main", "measure_skew"]

CHECKPOINT = checkpoint_path()
ROUTINGS = routings_path()
WINDOW = 384
CONTROL_STANDARD_DEVIATION = 0.08
FAVOURITES = 8
"""Number of favourite experts per layer: a quarter of them, the share of one of four ranks."""
PREDICTED = (8, 16)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutingSkew:
    """Routing skew, averaged over layers; masses are shares (0 to 1) of the routed (token, choice) pairs."""

    overall_share: float
    """Mass of the 8 favourites of all requests together."""
    domain_share: dict[str, float]
    """Mass, per domain, of that domain's own 8 favourites."""
    effective_experts: dict[str, float]
    """Per domain: exp of the entropy of its mass over the experts of a layer, 1 to 32."""
    cosine_same: float
    """Mean centred cosine of the profiles of two requests of one domain and different documents."""
    cosine_cross: float
    """The same for two requests of different domains."""
    decode_mass: dict[int, dict[str, float]]
    """Decode mass on the 8 or 16 experts predicted by: the overall prior, the domain, the request's own
    prompt, and the decode phase itself (upper bound)."""

    def closed_gap(self, count: int, source: str) -> float:
        """Return the share of the gap between overall prior and upper bound that a prediction source closes,
        0 to 1, for `count` experts a layer."""
        mass = self.decode_mass[count]
        return (mass[source] - mass["overall prior"]) / (mass["hindsight"] - mass["overall prior"])


def losses_by_domain(model: Qwen3MoeForCausalLM, documents: Sequence[Document]) -> dict[str, float]:
    """Return per domain the mean cross-entropy (nats per byte) over whole windows of `WINDOW` tokens of
    `documents`."""
    training = model.training
    model.eval()
    losses: dict[str, list[float]] = {}
    for document in documents:
        whole = len(document.text) // WINDOW * WINDOW
        tokens = torch.tensor(list(document.text[:whole])).view(-1, WINDOW)
        losses.setdefault(document.domain, []).extend(_losses(model, tokens).flatten().tolist())
    model.train(training)
    return {domain: float(np.mean(values)) for domain, values in losses.items()}


def losses_by_position(
    model: Qwen3MoeForCausalLM, documents: Sequence[Document], edges: Sequence[int]
) -> list[float]:
    """Return the mean cross-entropy (nats per byte) between neighbouring `edges` (positions) of windows of
    the full context length."""
    texts = [document.text for document in documents if len(document.text) >= CONTEXT_LENGTH]
    sums = torch.zeros(CONTEXT_LENGTH - 1)
    for text in texts:
        sums += _losses(model, torch.tensor(list(text[:CONTEXT_LENGTH])).view(1, -1))[0]
    return [float(sums[low:high].mean() / len(texts)) for low, high in pairwise(edges)]


def _losses(model: Qwen3MoeForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of every token but the first: float [windows, length - 1]."""
    with torch.no_grad():
        logits = model(input_ids=windows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none")


def control_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    """Return the same architecture, never trained, with all matrices drawn from N(0, 0.08)."""
    model = build_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=CONTROL_STANDARD_DEVIATION)
    set_expert_kernel(model, "eager")
    return model.eval()


def measure_skew(arrays: dict[str, npt.NDArray[Any]]) -> RoutingSkew:
    """Return the skew of the `test` requests with their own text of a file of `record_routings`; priors are
    learnt on its `fit` ones."""
    split = int(arrays["prompt"])
    fit = arrays["part"] == 0
    test = (arrays["part"] == 1) & ~arrays["sampled"]
    domain, document = arrays["domain"][test], arrays["document"][test]
    whole, prompt, decode = (
        histograms(arrays["experts"][:, cut]) for cut in (slice(None), slice(split), slice(split, None))
    )
    by_domain = {name: whole[test][domain == number].mean(0) for number, name in enumerate(DOMAINS)}
    learnt = np.stack([whole[fit & (arrays["domain"] == number)].mean(0) for number in range(len(DOMAINS))])
    profiles = whole[test].reshape(test.sum(), -1)
    profiles = profiles - profiles.mean(0)
    profiles /= np.linalg.norm(profiles, axis=1, keepdims=True)
    cosine = profiles @ profiles.T
    same = domain[:, None] == domain[None, :]
    sources = {
        "overall prior": learnt.mean(0)[None],
        "domain": learnt[domain],
        "own prompt": prompt[test],
        "hindsight": decode[test],
    }
    return RoutingSkew(
        overall_share=favourite_mass(whole[test].mean(0), whole[test].mean(0)),
        domain_share={name: favourite_mass(profile, profile) for name, profile in by_domain.items()},
        effective_experts={name: effective_experts(profile) for name, profile in by_domain.items()},
        cosine_same=float(cosine[same & (document[:, None] != document[None, :])].mean()),
        cosine_cross=float(cosine[~same].mean()),
        decode_mass={
            count: {
                name: favourite_mass(predicted, decode[test], count) for name, predicted in sources.items()
            }
            for count in PREDICTED
        },
    )


def histograms(experts: npt.NDArray[np.uint8], count: int = 32) -> FloatArray:
    """Return each request's share of choices per expert: uint8 [requests, tokens, layers, k] -> float
    [requests, layers, experts]."""
    layers = [
        np.stack([(experts[:, :, layer] == expert).mean((1, 2)) for expert in range(count)], -1)
        for layer in range(experts.shape[2])
    ]
    return np.stack(layers, 1)


def favourite_mass(predicted: FloatArray, actual: FloatArray, count: int = FAVOURITES) -> float:
    """Return the mass of `actual` on the `count` favourites of `predicted`, averaged: both float [...,
    layers, experts], broadcast."""
    order = np.argsort(-predicted, axis=-1, kind="stable")[..., :count]
    order = np.broadcast_to(order, (*actual.shape[:-1], count))
    return float(np.take_along_axis(actual, order, -1).sum(-1).mean())


def effective_experts(profile: FloatArray) -> float:
    """Return exp of the entropy of each layer's profile (float [layers, experts]), averaged over layers."""
    entropy = -(profile * np.log(np.where(profile > 0, profile, 1))).sum(-1)
    return float(np.exp(entropy).mean())


def _report(name: str, skew: RoutingSkew) -> None:
    log.info("%s", name)
    log.info(
        "  overall top-8 share %.2f; centred cosine same %.2f, cross %.2f",
        skew.overall_share,
        skew.cosine_same,
        skew.cosine_cross,
    )
    for domain in DOMAINS:
        log.info(
            "  %-6s top-8 share %.2f, effective experts %.1f",
            domain,
            skew.domain_share[domain],
            skew.effective_experts[domain],
        )
    for count, mass in skew.decode_mass.items():
        log.info(
            "  decode mass on %d experts predicted by %s",
            count,
            {source: round(share, 3) for source, share in mass.items()},
        )
        log.info(
            "  of the way from prior to hindsight: domain %.0f %%, prompt %.0f %%",
            *(100 * skew.closed_gap(count, source) for source in ("domain", "own prompt")),
        )


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    routings: Annotated[Path, typer.Option(help="Routings recorded with that checkpoint.")] = ROUTINGS,
) -> None:
    """Print loss and skew on the held-out documents, with the untrained control's skew on the same
    requests."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    documents = read_documents("test")
    model = load_model(checkpoint)
    losses = losses_by_domain(model, documents)
    log.info(
        "loss (nats per byte): mean %.3f; %s",
        np.mean(list(losses.values())),
        {name: round(loss, 2) for name, loss in losses.items()},
    )
    edges = (0, 384, 1024, CONTEXT_LENGTH - 1)
    log.info(
        "loss between positions %s: %s",
        edges,
        [round(loss, 3) for loss in losses_by_position(model, documents, edges)],
    )
    with np.load(routings) as file:
        arrays = dict(file)
    _report("trained", measure_skew(arrays))
    _report(
        "untrained control",
        measure_skew({**arrays, "experts": chosen_experts(control_model(), arrays["tokens"])}),
    )


if __name__ == "__main__":
    typer.run(main)
