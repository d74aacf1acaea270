"""The experts that another system's answer says were chosen: found in its JSON, decoded, counted. Pure; what it reads is not trusted.

Where they are: vLLM puts `routed_experts` into each choice (base64 of a .npy; in older versions nested lists), and the prompt's
apart into `prompt_routed_experts` where it tells them apart. SGLang puts base64 of raw int32 into `sglext` (OpenAI's routes) or
`meta_info` (its own). Dynamo passes either on in `nvext`. Rows are tokens, from some first one to the last but one of the sequence.

Both capture all layers of the model, and leave zeros for the dense ones. Roost counts layers with experts alone: where there are
more layers than the model has with experts, those in which every token names one expert several times are left out.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.routings import count_pairs, from_sglang, from_vllm

MARK = b"routed_experts"
MOST_EVENTS = 8
"""Events of one stream that are kept because they speak of experts; later ones replace earlier ones."""
NPY = "k05VTVBZ"
"""Base64 of how a .npy file begins, to the last whole character."""


class TokenUsage(NamedTuple):
    """Tokens as the answer counts them; 0: not told."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class RoutedCounts(NamedTuple):
    """What a request activated: int64 [layers, experts] (token, k) pairs of the computed tokens, prompt and completion apart."""

    tokens: int
    cached: int
    prompt: NDArray[np.int64]
    completion: NDArray[np.int64]


class RoutedExpertsParser:
    """Listens to an answer as it passes and keeps the events (or the whole body) that speak of experts. Changes nothing."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of one event; a longer one is let go."""
        self._most = most_bytes
        self._open = bytearray()
        self._kept: list[bytes] = []
        self.too_long = False

    def feed(self, data: bytes) -> None:
        """What is being passed on."""
        opened = len(self._open)
        self._open += data
        end = self._open.rfind(b"\n\n", max(0, opened - 1))
        if end >= 0:
            self._keep(bytes(self._open[:end]))
            del self._open[: end + 2]
        if len(self._open) > self._most:
            self.too_long = self.too_long or MARK in self._open
            self._open.clear()

    def found(self) -> list[bytes]:
        """What speaks of experts, once all has passed."""
        self._keep(bytes(self._open))
        self._open.clear()
        return self._kept

    def _keep(self, events: bytes) -> None:
        if MARK in events:
            self._kept = [*self._kept, events][-MOST_EVENTS:]


class _Said(msgspec.Struct, frozen=True):
    routed_experts: Any = None


class _Answer(msgspec.Struct, frozen=True):
    """The parts of an answer that may speak of experts."""

    choices: list[_Said] = []
    prompt_routed_experts: Any = None
    sglext: _Said | None = None
    meta_info: _Said | None = None
    nvext: _Said | None = None


def counted(said: list[bytes], shape: ModelShape, usage: TokenUsage) -> RoutedCounts | None:
    """The experts in events (or one body) that a `RoutedExpertsParser` kept; None when there is nothing in them.

    ValueError for what is no array of this model's experts.
    """
    prompt: NDArray[np.int32] | None = None
    whole: list[NDArray[np.int32]] = []
    for answer in map(_read, (event for events in said for event in events.split(b"\n\n"))):
        if answer is None:
            continue
        if answer.prompt_routed_experts is not None:
            prompt = _decoded(answer.prompt_routed_experts, shape, usage.prompt)
        held = next((one.routed_experts for one in (answer.sglext, answer.meta_info, answer.nvext) if one and one.routed_experts is not None), None)
        # The first choice speaks for the request: with several, each has the prompt again.
        held = held if held is not None else next((one.routed_experts for one in answer.choices if one.routed_experts is not None), None)
        if held is not None:
            whole.append(_decoded(held, shape, max(0, usage.prompt + usage.completion - 1)))
    if prompt is None and not whole:
        return None
    # Streams repeat all that was chosen so far: the longest says it all.
    chosen = max(whole, key=len, default=np.zeros((0, shape.layers, shape.top_k), np.int32))
    return _split(chosen, shape, usage) if prompt is None else _together(prompt, chosen, shape, usage)


def _read(event: bytes) -> _Answer | None:
    """One event, or a body; None when it does not speak of experts."""
    if MARK not in event:
        return None
    start = event.find(b"{")
    try:
        return msgspec.json.decode(event[max(0, start) :], type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"an answer that speaks of routed_experts cannot be read: {error}") from error


def _decoded(held: Any, shape: ModelShape, rows: int) -> NDArray[np.int32]:
    """int32 [tokens, layers, k], whichever way it is written. rows: tokens that a whole sequence would have; 0: not told."""
    if isinstance(held, str):
        chosen = from_vllm(held, shape.experts) if held.startswith(NPY) else from_sglang(held, _all_layers(held, shape, rows), shape.top_k, shape.experts)
    else:
        chosen = _from_lists(held, shape.experts)
    if chosen.shape[2] != shape.top_k:
        raise ValueError(f"routed_experts: {chosen.shape[2]} experts per token; the engine says {shape.top_k}")
    return _with_experts(chosen, shape.layers)


def _all_layers(held: str, shape: ModelShape, rows: int) -> int:
    """Layers of a raw array, dense ones included: what the usage implies, where it does; else those with experts."""
    numbers = (3 * len(held) // 4 - held[-2:].count("=")) // 4
    layers, rest = divmod(numbers, max(1, rows) * shape.top_k)
    return layers if rows and rest == 0 and layers >= shape.layers else shape.layers


def _from_lists(held: Any, experts: int) -> NDArray[np.int32]:
    try:
        table = np.array(held)
    except ValueError as error:
        raise ValueError("routed_experts: lists of different lengths") from error
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise ValueError(f"routed_experts: {type(held).__name__} of shape {table.shape}; expected text or integers [tokens, layers, k]")
    if table.size and (table.min() < 0 or table.max() >= experts):
        raise ValueError(f"routed_experts: ids run from {table.min()} to {table.max()}; expected 0 to {experts - 1}")
    return table.astype(np.int32)


def _with_experts(chosen: NDArray[np.int32], layers: int) -> NDArray[np.int32]:
    """Without the dense layers; ValueError when what is left is not this model's."""
    if chosen.shape[1] == layers:
        return chosen
    dense = (chosen == chosen[:, :, :1]).all(axis=(0, 2)) if chosen.shape[2] > 1 else ~chosen.any(axis=(0, 2))
    kept = chosen[:, ~dense]
    if kept.shape[1] != layers:
        raise ValueError(f"routed_experts: {chosen.shape[1]} layers, {int(dense.sum())} of them dense; the engine says {layers} with experts")
    return kept


def _split(chosen: NDArray[np.int32], shape: ModelShape, usage: TokenUsage) -> RoutedCounts:
    """One array of prompt and completion. Its last rows are the completion's, whose last token has none."""
    start = max(0, usage.prompt + usage.completion - 1 - len(chosen)) if usage.prompt else 0
    reused = min(max(0, usage.cached - start), len(chosen))
    border = max(reused, len(chosen) - max(0, usage.completion - 1))
    prompt, completion = count_pairs(chosen[reused:border], shape.experts), count_pairs(chosen[border:], shape.experts)
    return RoutedCounts(len(chosen) - reused, usage.cached, prompt, completion)


def _together(prompt: NDArray[np.int32], completion: NDArray[np.int32], shape: ModelShape, usage: TokenUsage) -> RoutedCounts:
    """Arrays of prompt and completion, told apart."""
    reused = min(max(0, usage.cached - max(0, usage.prompt - len(prompt))), len(prompt))
    tokens = len(prompt) - reused + len(completion)
    return RoutedCounts(tokens, usage.cached, count_pairs(prompt[reused:], shape.experts), count_pairs(completion, shape.experts))
