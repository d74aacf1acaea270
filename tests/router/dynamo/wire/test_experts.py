"""Experts in every encoding that passes through Dynamo reach the parser that counts them."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from fleet.experts import ModelShape
from router.dynamo.wire.experts import as_answer
from router.dynamo.wire.malformed import Malformed
from router.foreign_api.routed_experts_parser import TokenUsage, counted

SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=1, expert_intermediate=1)
CHOSEN = np.arange(5 * 2 * 2).reshape(5, 2, 2) % 8


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def raw(kind: str) -> dict[str, Any]:
    data = base64.b64encode(CHOSEN.astype(kind).tobytes()).decode()
    return {"data": data, "shape": [5, 2, 2], "start": 0, "dtype": kind}


@pytest.mark.parametrize(
    "held",
    [
        npy(CHOSEN.astype(np.uint8)),
        base64.b64encode(CHOSEN.astype(np.int32).tobytes()).decode(),
        raw("int32"),
        raw("uint8"),
        CHOSEN.tolist(),
    ],
)
def test_every_encoding_counts_alike(held: Any) -> None:
    found = counted([as_answer(held)], SHAPE, TokenUsage(prompt=4, completion=2))
    assert found is not None
    assert (found.prompt + found.completion).tolist() == [
        np.bincount(CHOSEN[:, layer].ravel(), minlength=8).tolist() for layer in range(2)
    ]


@pytest.mark.parametrize(
    "held",
    [
        None,
        7,
        {},
        {"data": "!", "shape": [1, 1, 1], "dtype": "uint8"},
        raw("uint8") | {"dtype": "object"},
        raw("uint8") | {"shape": [6, 2, 2]},
    ],
)
def test_other_encodings_are_malformed(held: Any) -> None:
    with pytest.raises(Malformed):
        as_answer(held)
