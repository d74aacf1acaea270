"""Parser of routed experts in the answers of foreign servers: finds them in the JSON, decodes and counts
them. Pure. The input is not trusted.

Locations: vLLM puts `routed_experts` into each choice (base64 of a .npy; in older versions nested lists), and
the prompt's experts into `prompt_routed_experts` if it separates them. SGLang puts base64 of raw int32 into
`sglext` (OpenAI's routes) or `meta_info` (its own routes). Dynamo passes either on in `nvext`. Rows are
tokens, from some first token to the last but one of the sequence.

Both servers capture all layers of the model and leave zeros for the dense ones. Roost counts only layers with
experts. If an array has more layers than the model has with experts, the layers in which every token names
one expert several times are left out.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.completions import UNREADABLE
from fleet.experts import ModelShape
from fleet.routings import count_pairs, from_sglang, from_vllm

MARK = b"routed_experts"
MAX_EVENTS = 8
"""Most events of one stream that are kept because they mention experts. Later ones replace earlier ones."""
NPY = "k05VTVBZ"
"""Base64 of the beginning of a .npy file, up to the last complete character."""


class TokenUsage(NamedTuple):
    """Token counts stated by the answer; 0: not stated."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class RoutedCounts(NamedTuple):
    """Experts activated by a request: int64 [layers, experts] (token, k) pairs of the computed tokens, for
    prompt and completion separately.
    """

    tokens: int
    cached: int
    prompt: NDArray[np.int64]
    completion: NDArray[np.int64]


class RoutedExpertsParser:
    """Observes an answer as it passes and keeps the events (or the entire body) that mention experts. Changes
    nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: limit for one event. Longer events are not kept."""
        self._max_bytes = max_bytes
        self._open = bytearray()
        self._kept: list[bytes] = []
        self.too_long = False

    def feed(self, data: bytes) -> None:
        """Observe bytes that are being passed on."""
        opened = len(self._open)
        self._open += data
        end = self._open.rfind(b"\n\n", max(0, opened - 1))
        if end >= 0:
            self._keep(bytes(self._open[:end]))
            del self._open[: end + 2]
        if len(self._open) > self._max_bytes:
            self.too_long = self.too_long or MARK in self._open
            self._open.clear()

    def found(self) -> list[bytes]:
        """Return the parts that mention experts, once everything has passed."""
        self._keep(bytes(self._open))
        self._open.clear()
        return self._kept

    def _keep(self, events: bytes) -> None:
        if MARK in events:
            self._kept = [*self._kept, events][-MAX_EVENTS:]


class _Holder(msgspec.Struct, frozen=True):
    routed_experts: Any = None


class _Answer(msgspec.Struct, frozen=True):
    """Parts of an answer that may mention experts."""

    choices: list[_Holder] = []
    prompt_routed_experts: Any = None
    sglext: _Holder | None = None
    meta_info: _Holder | None = None
    nvext: _Holder | None = None


def counted(events: list[bytes], shape: ModelShape, usage: TokenUsage) -> RoutedCounts | None:
    """Count the experts in the events (or the body) kept by a `RoutedExpertsParser`; None without any.

    ValueError if the content is not an array of this model's experts.
    """
    prompt: NDArray[np.int32] | None = None
    whole: list[NDArray[np.int32]] = []
    for answer in map(_read, (event for piece in events for event in piece.split(b"\n\n"))):
        if answer is None:
            continue
        if answer.prompt_routed_experts is not None:
            prompt = _decoded(answer.prompt_routed_experts, shape, usage.prompt)
        held = next(
            (
                one.routed_experts
                for one in (answer.sglext, answer.meta_info, answer.nvext)
                if one and one.routed_experts is not None
            ),
            None,
        )
        # Only the first choice counts, since each of several choices contains the prompt again.
        held = (
            held
            if held is not None
            else next((one.routed_experts for one in answer.choices if one.routed_experts is not None), None)
        )
        if held is not None:
            whole.append(_decoded(held, shape, max(0, usage.prompt + usage.completion - 1)))
    if prompt is None and not whole:
        return None
    # Streams repeat all choices so far, so the longest array is complete.
    chosen = max(whole, key=len, default=np.zeros((0, shape.layers, shape.top_k), np.int32))
    return _split(chosen, shape, usage) if prompt is None else _together(prompt, chosen, shape, usage)


def _read(event: bytes) -> _Answer | None:
    """Parse one event, or a body; None if it does not mention experts."""
    if MARK not in event:
        return None
    start = event.find(b"{")
    try:
        return msgspec.json.decode(event[max(0, start) :], type=_Answer)
    except UNREADABLE as error:
        raise ValueError(f"an answer with routed_experts cannot be read: {error}") from error


def _decoded(held: Any, shape: ModelShape, rows: int) -> NDArray[np.int32]:
    """Decode any of the forms, int32 [tokens, layers, k]. rows: tokens of a complete sequence; 0: not
    stated."""
    if isinstance(held, str):
        chosen = (
            from_vllm(held, shape.experts)
            if held.startswith(NPY)
            else from_sglang(held, _all_layers(held, shape, rows), shape.top_k, shape.experts)
        )
    else:
        chosen = _from_lists(held, shape.experts)
    if chosen.shape[2] != shape.top_k:
        raise ValueError(f"routed_experts: {chosen.shape[2]} experts per token; the engine has {shape.top_k}")
    return _with_experts(chosen, shape.layers)


def _all_layers(held: str, shape: ModelShape, rows: int) -> int:
    """Return the number of layers of a raw array, dense ones included: implied by the usage if possible, else
    those with experts.
    """
    numbers = (3 * len(held) // 4 - held[-2:].count("=")) // 4
    layers, rest = divmod(numbers, max(1, rows) * shape.top_k)
    return layers if rows and rest == 0 and layers >= shape.layers else shape.layers


def _from_lists(held: Any, experts: int) -> NDArray[np.int32]:
    try:
        table = np.array(held)
    except ValueError as error:
        raise ValueError("routed_experts: lists of different lengths") from error
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise ValueError(
            f"routed_experts: {type(held).__name__} of shape {table.shape}; expected text or integers"
            " [tokens, layers, k]"
        )
    if table.size and (table.min() < 0 or table.max() >= experts):
        raise ValueError(
            f"routed_experts: ids run from {table.min()} to {table.max()}; expected 0 to {experts - 1}"
        )
    return table.astype(np.int32)


def _with_experts(chosen: NDArray[np.int32], layers: int) -> NDArray[np.int32]:
    """Remove the dense layers. ValueError if the remaining layers are not this model's."""
    if chosen.shape[1] == layers:
        return chosen
    dense = (chosen == chosen[:, :, :1]).all(axis=(0, 2)) if chosen.shape[2] > 1 else ~chosen.any(axis=(0, 2))
    kept = chosen[:, ~dense]
    if kept.shape[1] != layers:
        raise ValueError(
            f"routed_experts: {chosen.shape[1]} layers, {int(dense.sum())} of them dense; the engine has"
            f" {layers} with experts"
        )
    return kept


def _split(chosen: NDArray[np.int32], shape: ModelShape, usage: TokenUsage) -> RoutedCounts:
    """Split one array of prompt and completion. The last rows belong to the completion, whose last token has
    none.
    """
    # Rows are missing at the beginning only: a server that reused cached tokens may leave theirs out.
    start = max(0, usage.prompt + usage.completion - 1 - len(chosen)) if usage.prompt else 0
    reused = min(max(0, usage.cached - start), len(chosen))
    border = max(reused, len(chosen) - max(0, usage.completion - 1))
    prompt, completion = (
        count_pairs(chosen[reused:border], shape.experts),
        count_pairs(chosen[border:], shape.experts),
    )
    return RoutedCounts(len(chosen) - reused, usage.cached, prompt, completion)


def _together(
    prompt: NDArray[np.int32], completion: NDArray[np.int32], shape: ModelShape, usage: TokenUsage
) -> RoutedCounts:
    """Count separate arrays of prompt and completion."""
    reused = min(max(0, usage.cached - max(0, usage.prompt - len(prompt))), len(prompt))
    tokens = len(prompt) - reused + len(completion)
    return RoutedCounts(
        tokens,
        usage.cached,
        count_pairs(prompt[reused:], shape.experts),
        count_pairs(completion, shape.experts),
    )
