"""What a tracker would say, made by hand: clusters that each want their own experts, and tables that know a
few prefixes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.facts.demand import ClustersPublished, KeyedRows, TablesPublished
from fleet.prediction import SOURCES, row
from fleet.signatures import ClusterModel, pack

Rows = Mapping[int, tuple[Sequence[float], float]]
"""By key: the weights over the clusters, and the tokens of evidence behind them."""


def clusters(profiles: Any, shares: Sequence[float] | None = None, version: int = 1) -> ClusterModel:
    """profiles: [K, layers, experts], any positive numbers; shares: even unless given."""
    table = np.asarray(profiles, np.float32)
    mix = (
        np.full(len(table), 1 / len(table), np.float32) if shares is None else np.asarray(shares, np.float32)
    )
    return ClusterModel(version, table / table.sum(axis=2, keepdims=True), mix, 0.1)


def halves(version: int = 1, skew: float = 9.0) -> ClusterModel:
    """Two clusters over [2 layers, 4 experts]: the first wants experts 0 and 1, the second 2 and 3."""
    return clusters([[[skew, skew, 1, 1]] * 2, [[1, 1, skew, skew]] * 2], version=version)


def published_clusters(model: ClusterModel) -> ClustersPublished:
    return ClustersPublished(model="demo", record=model.record())


def tables(
    version: int = 1,
    base: int | None = None,
    *,
    shares: Sequence[float] = (0.5, 0.5),
    gain: float = 1.0,
    trust: float = 1.0,
    reliability: float = 0.5,
    tokens: NDArray[Any] | None = None,
    blocks: Rows | None = None,
    sessions: Rows | None = None,
    tenants: Rows | None = None,
    **more: Any,
) -> TablesPublished:
    """Tables of model demo; `tokens`: the whole token table, float [buckets, K]."""
    table = np.zeros((0, len(shares))) if tokens is None else tokens
    values: dict[str, Any] = {
        "model": "demo",
        "version": version,
        "base": base,
        "clusters": 1,
        "shares": np.asarray(shares, "<f4").tobytes(),
        "trust": dict.fromkeys(SOURCES, trust),
        "reliability": dict.fromkeys(SOURCES, reliability),
        "gain": gain,
        "buckets": len(table),
        "token_rows": np.arange(len(table), dtype="<u4").tobytes(),
        "token_ratios": table.astype("<f2").tobytes(),
        "blocks": keyed(blocks or {}),
        "sessions": keyed(sessions or {}),
        "tenants": keyed(tenants or {}),
        **more,
    }
    return TablesPublished(**values)


def keyed(rows: Rows) -> KeyedRows:
    packed = b"".join(row(pack(np.asarray(weights)).tobytes(), tokens) for weights, tokens in rows.values())
    return KeyedRows(keys=np.array(list(rows), "<u8").tobytes(), rows=packed)
