"""Recorded routings as traffic: requests with prompts, prefixes, sessions and tenants."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo_model.evaluate import control_model
from benchmarks.demo_model.record_routings import chosen_experts
from fleet.blocks import BLOCK_SIZE, local_hashes, sequence_hashes
from fleet.routings import UNKNOWN, count_pairs

VOCABULARY = 256
"""Token ids of the demo model: its routings can be recorded again with other weights."""
ONE_NAME_IN = 5
"""One in this many requests of a kind has the name of a random tenant."""


@dataclass(frozen=True)
class Routings:
    """Arrays over requests [R], as `benchmarks.demo_model.record_routings` writes them. experts: [R, tokens,
    layers, k]; prompt: tokens of the prompt."""

    tokens: NDArray[Any]
    experts: NDArray[Any]
    prompt: int
    part: NDArray[Any]
    sampled: NDArray[np.bool_]
    domain: NDArray[Any]
    document: NDArray[Any]
    start: NDArray[Any]
    domains: tuple[str, ...]
    width: int
    """experts of a layer"""

    @property
    def layers(self) -> int:
        return int(self.experts.shape[2])

    def where(self, part: int, *, sampled: bool = False) -> NDArray[np.intp]:
        """Return the requests of a part (0: fit, 1: test), with the text's own continuation or with a sampled
        one."""
        return np.flatnonzero((self.part == part) & (self.sampled == sampled))


def load(path: Path) -> Routings:
    """Read a file. If `part` is missing, every other document of each domain is for fitting; sampled, start
    and domains may be missing too."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    count, domain, document = len(arrays["tokens"]), arrays["domain"], arrays["document"]
    names = arrays.get("domains", np.unique(domain))
    return Routings(
        tokens=arrays["tokens"],
        experts=arrays["experts"],
        prompt=int(arrays["prompt"]),
        part=arrays["part"] if "part" in arrays else _halved(domain, document),
        sampled=np.asarray(arrays.get("sampled", np.zeros(count)), np.bool_),
        domain=domain,
        document=document,
        start=arrays.get("start", np.arange(count)),
        domains=tuple(str(name) for name in names),
        width=int(arrays["experts"].max()) + 1,
    )


def _halved(domain: NDArray[Any], document: NDArray[Any]) -> NDArray[np.intp]:
    part = np.zeros(len(domain), np.intp)
    for kind in np.unique(domain):
        part[np.isin(document, np.unique(document[domain == kind])[1::2]) & (domain == kind)] = 1
    return part


def untrained(routings: Routings, rows: NDArray[np.intp]) -> Routings:
    """Route some requests of the demo model with the same architecture, untrained. Raises ValueError for
    another model's tokens."""
    if routings.tokens.max() >= VOCABULARY:
        raise ValueError("only routings of the demo model can be recorded anew with random weights")
    tokens = routings.tokens[rows].astype(np.uint8)
    chosen = chosen_experts(control_model(), tokens)
    per_request = {
        name: getattr(routings, name)[rows] for name in ("part", "sampled", "domain", "document", "start")
    }
    return replace(routings, tokens=tokens, experts=chosen, width=int(routings.width), **per_request)


class Request(NamedTuple):
    """Request as it reaches the fleet. ids: of its prompt; hashes: of the prompt's full blocks; blocks: of
    all, completion included; routed: int16 [tokens, layers, k]; cached: leading blocks in the rank's cache.
    """

    number: int
    ids: list[int]
    hashes: list[int]
    blocks: list[int]
    routed: NDArray[np.int16]
    session: int = 0
    tenant: int = 0
    cached: int = 0

    @property
    def computed(self) -> NDArray[np.int16]:
        """Return the activations that the rank computes: UNKNOWN for cached tokens."""
        routed = self.routed.copy()
        routed[: self.cached * BLOCK_SIZE] = UNKNOWN
        return routed

    @property
    def first_seen(self) -> "Request":
        """Return the request with a prefix that no cache or table knows."""
        return self._replace(hashes=[])

    def opening(self, blocks: int) -> "Request":
        """Return a request that consists of exactly these first blocks."""
        tokens = blocks * BLOCK_SIZE
        return self._replace(
            ids=self.ids[:tokens],
            hashes=self.hashes[:blocks],
            blocks=self.blocks[:blocks],
            routed=self.routed[:tokens],
            session=0,
            tenant=0,
            cached=0,
        )


def request(routings: Routings, row: int, **known: int) -> Request:
    """Return row `row` of the file."""
    ids = routings.tokens[row].tolist()
    prompt, blocks = ids[: routings.prompt], sequence_hashes(local_hashes(ids))
    return Request(
        int(row),
        prompt,
        blocks[: len(prompt) // BLOCK_SIZE],
        blocks,
        routings.experts[row].astype(np.int16),
        **known,
    )


def tenants(routings: Routings, random: np.random.Generator) -> NDArray[np.int64]:
    """Return int64 [R]: tenant of each request: one per domain, sometimes another one."""
    own, any_one = (
        routings.domain.astype(np.int64),
        random.integers(0, len(routings.domains), len(routings.domain)),
    )
    return 1 + np.where(random.integers(0, ONE_NAME_IN, len(own)) == 0, any_one, own)


def stream(
    routings: Routings, rows: NDArray[np.intp], random: np.random.Generator
) -> Iterator[tuple[Request, bool]]:
    """Yield requests in random order. A third continue a prefix that another request (marked by False) has
    just created, half of the documents are conversations, four in five requests name a tenant."""
    names, order = tenants(routings, random), random.permutation(rows)
    talks = random.random(int(routings.document.max()) + 1) < 0.5
    for row in order:
        session = int(routings.document[row]) + 1 if talks[routings.document[row]] else 0
        tenant = int(names[row]) if random.random() < 0.8 else 0
        request_body = request(routings, row, session=session, tenant=tenant)
        most = min(8, len(request_body.hashes) - 1)
        if most > 0 and random.random() < 1 / 3:
            blocks = int(random.integers(1, most + 1))
            yield request_body.opening(blocks), False
            request_body = request_body._replace(cached=blocks)
        yield request_body, True


def counted(
    requests: Sequence[Request], width: int, prompt: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return float64 [n, layers, experts] twice: activations of the uncached prompt and completion together,
    and of the completion alone."""
    everything = np.stack([count_pairs(each.routed[each.cached * BLOCK_SIZE :], width) for each in requests])
    completion = np.stack([count_pairs(each.routed[prompt:], width) for each in requests])
    return everything.astype(np.float64), completion.astype(np.float64)
