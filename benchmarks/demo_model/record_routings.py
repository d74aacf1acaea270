"""Record which experts the demo model chose, token by token, on the held-out documents.

The file (`routings_path()`, a numpy archive) holds R requests of 384 tokens, of which the first 192 are the
prompt:

| array     | shape, type            | meaning                                                                                     |
|-----------|------------------------|---------------------------------------------------------------------------------------------|
| tokens    | uint8 [R, 384]         | token ids (bytes)                                                                           |
| experts   | uint8 [R, 384, 4, 4]   | chosen experts by request, token, layer, in falling order of routing weight                 |
| prompt    | int64 scalar           | tokens of the prompt: below it prefill, from it on decode                                   |
| part      | uint8 [R]              | 0: `fit`, 1: `test`; no document has requests in both                                       |
| sampled   | bool [R]               | the continuation was sampled by the model (T = 0.8); otherwise it is the document's own     |
| domain    | uint8 [R]              | index into `domains`                                                                        |
| document  | uint8 [R]              | index into `documents`                                                                      |
| start     | uint16 [R]             | where in the document the request begins, in bytes                                          |
| domains   | str [9]                | names of the domains                                                                        |
| documents | str [D]                | SHA-256 of the documents, as in the manifest of the held-out documents                      |

The weights are the committed bf16 ones, computed in fp32; every token's experts are those of one forward pass
over its request.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from transformers import DynamicCache, Qwen3MoeForCausalLM

from benchmarks.demo_model import DOMAINS, routings_path
from benchmarks.demo_model.architecture import EOS_ID, load_model, router_outputs
from benchmarks.demo_model.corpus import Document
from benchmarks.demo_model.heldout import read_documents
from deploy.demo_model import checkpoint_path

__all__ = ["PROMPT_TOKENS", "REQUEST_TOKENS", "chosen_experts", "main", "record", "windows"]

CHECKPOINT = checkpoint_path()
ROUTINGS = routings_path()
REQUEST_TOKENS = 384
PROMPT_TOKENS = 192
TEMPERATURE = 0.8
PARTS = ("fit", "test")
BATCH = 24

log = logging.getLogger(__name__)


def windows(document: Document, count: int) -> list[int]:
    """Return up to `count` starts of disjoint requests in a document, spread over it, each at the start of a
    character."""
    room = len(document.text) - REQUEST_TOKENS
    count = min(count, len(document.text) // (REQUEST_TOKENS + 3))
    spread = [room * number // max(1, count - 1) for number in range(count)] if count > 1 else [0]
    return [_start_of_character(document.text, start) for start in spread]


def _start_of_character(text: bytes, position: int) -> int:
    while position > 0 and text[position] & 0xC0 == 0x80:
        position -= 1
    return position


def chosen_experts(model: Qwen3MoeForCausalLM, tokens: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the experts chosen in one forward pass per request.

    Args:
        model: the model, in fp32 and in evaluation mode.
        tokens: uint8 [requests, length].

    Returns:
        uint8 [requests, length, layers, k], in falling order of routing weight.
    """
    chosen = []
    for rows in np.array_split(tokens, -(-len(tokens) // BATCH)):
        with torch.no_grad(), router_outputs(model) as routed:
            model.model(input_ids=torch.from_numpy(rows.astype(np.int64)), use_cache=False)
        layers = [indices.view(*rows.shape, -1) for _, indices in routed]
        chosen.append(torch.stack(layers, dim=2).to(torch.uint8).numpy())
    return np.concatenate(chosen)


def continue_prompts(
    model: Qwen3MoeForCausalLM, prompts: npt.NDArray[np.uint8], seed: int
) -> npt.NDArray[np.uint8]:
    """Return the prompts (uint8 [requests, PROMPT_TOKENS]) with continuations sampled up to REQUEST_TOKENS,
    never ending early."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(prompts.astype(np.int64))
    cache, fed = DynamicCache(), tokens
    while tokens.shape[1] < REQUEST_TOKENS:
        with torch.no_grad():
            logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[:, -1]
        logits[:, EOS_ID] = -torch.inf
        fed = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=random)
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens.to(torch.uint8).numpy()


def record(
    model: Qwen3MoeForCausalLM,
    documents: Mapping[str, Sequence[Document]],
    *,
    fit_windows: int,
    test_windows: int,
    sampled: int,
    seed: int,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the file (see the table above).

    Args:
        model: the model, in fp32 and in evaluation mode.
        documents: the documents of each part.
        fit_windows: requests per `fit` document, at most.
        test_windows: the same per `test` document.
        sampled: how many of each test document's windows are recorded once more with a sampled continuation.
        seed: of the samples.
    """
    plan = [
        (part, number, start, again)
        for part, per_document in zip(PARTS, (fit_windows, test_windows), strict=True)
        for number, document in enumerate(documents[part])
        for order, start in enumerate(windows(document, per_document))
        for again in ((False, True) if part == "test" and order < sampled else (False,))
    ]
    tokens = np.stack([_cut(documents[part][number], start) for part, number, start, _ in plan])
    is_sampled = np.array([again for *_, again in plan])
    if is_sampled.any():
        tokens[is_sampled] = continue_prompts(model, tokens[is_sampled, :PROMPT_TOKENS], seed)
    everything = [document for part in PARTS for document in documents[part]]
    offsets = {"fit": 0, "test": len(documents["fit"])}
    return {
        "tokens": tokens,
        "experts": chosen_experts(model, tokens),
        "prompt": np.array(PROMPT_TOKENS),
        "part": np.array([PARTS.index(part) for part, *_ in plan], dtype=np.uint8),
        "sampled": is_sampled,
        "domain": np.array(
            [DOMAINS.index(documents[part][number].domain) for part, number, *_ in plan], dtype=np.uint8
        ),
        "document": np.array([offsets[part] + number for part, number, *_ in plan], dtype=np.uint8),
        "start": np.array([start for _, _, start, _ in plan], dtype=np.uint16),
        "domains": np.array(DOMAINS),
        "documents": np.array([document.digest for document in everything]),
    }


def _cut(document: Document, start: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(document.text[start : start + REQUEST_TOKENS], dtype=np.uint8)


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    out: Annotated[Path, typer.Option(help="The file to write.")] = ROUTINGS,
    fit_windows: Annotated[int, typer.Option(min=1, help="Requests per fit document, at most.")] = 5,
    test_windows: Annotated[int, typer.Option(min=1, help="Requests per test document, at most.")] = 3,
    sampled: Annotated[
        int,
        typer.Option(min=0, help="Number of these that are recorded once more with a sampled continuation."),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Record routings on the held-out documents; needs the machine's own copies of the fit documents."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    documents = {part: read_documents(part) for part in PARTS}
    arrays = record(
        load_model(checkpoint),
        documents,
        fit_windows=fit_windows,
        test_windows=test_windows,
        sampled=sampled,
        seed=seed,
    )
    np.savez_compressed(out, allow_pickle=False, **arrays)
    counts = [int(((arrays["part"] == number) & ~arrays["sampled"]).sum()) for number in range(len(PARTS))]
    log.info(
        "%d fit, %d test and %d sampled requests; %s bytes",
        *counts,
        arrays["sampled"].sum(),
        f"{out.stat().st_size:,}",
    )


if __name__ == "__main__":
    typer.run(main)
