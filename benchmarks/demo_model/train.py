"""Train the demo model with one command. With one thread, the same seed and text give the same model.

    python -m benchmarks.demo_model.train --out checkpoint

Each batch has one row per domain: a random window of that domain's concatenated documents. The load-balance
loss is taken over the whole batch, so that each domain may prefer its own experts. A balance loss per
sequence would suppress the specialisation that this model demonstrates.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer
from transformers import Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.demo_model.architecture import (
    build_model,
    router_outputs,
    set_expert_kernel,
    write_checkpoint,
)
from benchmarks.demo_model.corpus import CorpusError, concatenate, gather
from benchmarks.demo_model.evaluate import losses_by_domain
from benchmarks.demo_model.heldout import read_documents, texts_not_to_train_on
from benchmarks.demo_model.optimiser import build_optimisers

__all__ = ["main", "train"]

WINDOW = 384
LONG_WINDOWS = {64: 2048, 16: 1024}
"""Longer windows of every 64th and every 16th step in the second half, so that training covers the stated
context length."""
BALANCE = 0.01
WARM_UP_STEPS = 40
FLOOR = 0.04
"""Final learning rate, as a share of its peak."""
CLIP = 1.0

log = logging.getLogger(__name__)


def train(
    corpus: Sequence[npt.NDArray[np.uint8]],
    *,
    steps: int,
    seed: int,
    watch: Callable[[int, Qwen3MoeForCausalLM], None] | None = None,
) -> Qwen3MoeForCausalLM:
    """Return a model trained for `steps` steps.

    Args:
        corpus: per domain its text, uint8 [bytes].
        steps: optimiser steps; the learning rate's schedule ends with the last.
        seed: of the weights and of the windows drawn.
        watch: called after every step with its number (from 1) and the model.
    """
    model = build_model(seed)
    set_expert_kernel(model, "grouped_mm")
    model.train()
    optimisers = build_optimisers(model)
    random = np.random.default_rng(seed)
    started, tokens = time.monotonic(), 0
    for step in range(1, steps + 1):
        batch = draw_batch(corpus, window_length(step, steps), random)
        tokens += batch.numel()
        loss, balance = _losses(model, batch)
        (loss + BALANCE * balance).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        _update(optimisers, rate(step, steps))
        if step % 20 == 0 or step in {1, steps}:
            log.info(
                "step %d of %d: loss %.3f, balance %.3f, gradient %.2f, %s tokens, %.0f s",
                step, steps, loss.item(), balance.item(), norm.item(), f"{tokens:,}", time.monotonic() - started,
            )  # fmt: skip
        if watch is not None:
            watch(step, model)
    return model


def _update(optimisers: list[tuple[torch.optim.Optimizer, float]], part_of_peak: float) -> None:
    for optimiser, peak in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = peak * part_of_peak
        optimiser.step()
        optimiser.zero_grad()


def window_length(step: int, steps: int) -> int:
    """Return the tokens per row of step `step` (counted from 1)."""
    if step > steps // 2:
        for every, length in LONG_WINDOWS.items():
            if step % every == 0:
                return length
    return WINDOW


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a part of its peak: a linear warm-up, then a cosine down to
    `FLOOR`."""
    if step <= WARM_UP_STEPS:
        return step / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def draw_batch(
    corpus: Sequence[npt.NDArray[np.uint8]], length: int, random: np.random.Generator
) -> torch.Tensor:
    """Return one window per domain: token ids int64 [domains, length]."""
    starts = [int(random.integers(0, len(text) - length)) for text in corpus]
    return torch.from_numpy(
        np.stack([text[start : start + length] for text, start in zip(corpus, starts, strict=True)]).astype(
            np.int64
        )
    )


def _losses(model: Qwen3MoeForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy (nats per byte) and the load-balance loss (1 when all experts are used
    alike)."""
    with router_outputs(model) as routed:
        logits = model(input_ids=batch, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return loss, torch.stack([balance_loss(scores, chosen) for scores, chosen in routed]).mean()


def balance_loss(router_logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return E * sum over experts of (mean router probability * share of selections) of one layer.

    Args:
        router_logits: float [tokens, experts].
        chosen: expert ids [tokens, k].
    """
    experts = router_logits.shape[-1]
    probability = router_logits.softmax(-1).mean(0)
    share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (probability * share).sum()


def main(
    out: Annotated[Path, typer.Option(help="Folder the checkpoint is written to.")],
    steps: Annotated[
        int, typer.Option(min=1, help="Optimiser steps; the learning rate's schedule spans them.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the documents and the windows drawn.")] = 0,
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            help="Torch threads. One is reproducible bit for bit; two on two busy cores are slower than one.",
        ),
    ] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between evaluations and checkpoints.")] = 200,
) -> None:
    """Train the demo model from scratch on text found on this machine (about a quarter of an hour on one free
    core)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()
    torch.set_num_threads(threads)
    try:
        documents = gather(texts_not_to_train_on(), seed=seed, report=log.info)
    except CorpusError as error:
        raise typer.BadParameter(str(error)) from error
    test = read_documents("test")

    def watch(step: int, model: Qwen3MoeForCausalLM) -> None:
        if step % every == 0 or step == steps:
            write_checkpoint(model, out)
            losses = losses_by_domain(model, test)
            log.info(
                "held out: mean %.3f; %s",
                np.mean(list(losses.values())),
                {name: round(loss, 2) for name, loss in losses.items()},
            )

    train([concatenate(of_domain) for of_domain in documents.values()], steps=steps, seed=seed, watch=watch)


if __name__ == "__main__":
    typer.run(main)
