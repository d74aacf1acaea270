"""Operations on rows of a step: compiled loops for fp32 values (`engine_adapter.embedded.kernels`), and torch
for other types and where there is no compiled library.

The compiled loops compute every row alone, so a row's result has the same bits in every batch.
"""

import torch
import torch.nn.functional as F

from engine_adapter.embedded.kernels import LayerLoops, compiled
from fleet.arrays import IntArray


def compiled_loops(dtype: torch.dtype) -> LayerLoops | None:
    """Return the compiled loops for values of this type. None: torch computes them."""
    return compiled() if dtype == torch.float32 else None


def product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows [n, inputs] by a matrix [outputs, inputs], of which the inputs of an output are
    contiguous, and add a bias [outputs]. Return [n, outputs]."""
    loops = compiled_loops(rows.dtype)
    if loops is None:
        return F.linear(rows, matrix, bias)
    outputs, inputs = matrix.shape
    rows = rows.contiguous()
    count = rows.shape[0]
    out = rows.new_empty((count, outputs))
    loops.product(
        rows.data_ptr(),
        inputs,
        matrix.data_ptr(),
        matrix.stride(0),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        outputs,
        count,
        inputs,
        outputs,
    )
    return out


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale rows [n, H] to a mean square of 1, then by weight [H]."""
    loops = compiled_loops(rows.dtype)
    if loops is None:
        return F.rms_norm(rows, weight.shape, weight, epsilon)
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    loops.norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows.shape, epsilon)
    return out


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [n, I] of rows [n, 2I], which have the gates before the ups. Contiguous rows may
    be overwritten."""
    loops = compiled_loops(rows.dtype)
    if loops is None:
        gate, up = rows.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out = rows.new_empty((rows.shape[0], rows.shape[1] // 2))
    loops.gated(rows.data_ptr(), out.data_ptr(), *out.shape)
    return out


def weighted_sum(rows: torch.Tensor, row_of_pair: IntArray, weights: torch.Tensor) -> torch.Tensor:
    """Sum rows [n, H] over each token's pairs with weights fp32 [T, k], in k order: fp32 [T, H]. row_of_pair:
    int64 [T * k], the row of each pair."""
    loops = compiled_loops(rows.dtype)
    if loops is None:
        return _weighted_sum(rows.index_select(0, torch.from_numpy(row_of_pair)), weights)
    tokens, k = weights.shape
    rows, weights = rows.contiguous(), weights.contiguous()
    out = rows.new_empty((tokens, rows.shape[1]))
    loops.weighted(
        rows.data_ptr(),
        row_of_pair.ctypes.data,
        weights.data_ptr(),
        out.data_ptr(),
        tokens,
        k,
        rows.shape[1],
    )
    return out


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum rows [T * k, H]. Overwrites them.

    Products and sums are separate, exactly rounded operations, so vectorization cannot change a bit.
    """
    tokens, k = weights.shape
    products = rows.view(tokens, k, rows.shape[1]).to(torch.float32).mul_(weights.unsqueeze(-1))
    total = products[:, 0]
    for at in range(1, k):
        total += products[:, at]
    return total
