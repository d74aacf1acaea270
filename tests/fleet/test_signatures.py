"""Signatures: packing, computation from counts, and cluster models in wire format."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet.signatures import MAX_CLUSTERS, NAMED, PACKED, ClusterModel, pack, posterior, unpack


def simplex(clusters: int, zeros: bool = False) -> st.SearchStrategy[Any]:
    """Draw float32 [clusters] with sum 1; with `zeros`, some may be 0."""
    parts = hnp.arrays(np.float64, clusters, elements=st.floats(0 if zeros else 1e-3, 1))
    return parts.map(lambda found: found + (found.sum() == 0)).map(
        lambda found: (found / found.sum()).astype(np.float32)
    )


pairs = st.integers(1, MAX_CLUSTERS).flatmap(
    lambda k: st.tuples(simplex(k, zeros=True), simplex(k, zeros=True))
)


@given(pairs)
def test_unpacked_weights_are_on_the_simplex_and_close_where_they_were_named(drawn: Any) -> None:
    weights, shares = drawn
    packed = pack(weights)
    again = unpack(packed.tolist(), shares.copy())
    assert packed.shape == (PACKED,)
    assert (again >= 0).all()
    assert again.sum() == pytest.approx(1.0, abs=1e-5)
    named = np.argsort(-weights, kind="stable")[:NAMED]
    lost = 1.0 - float(weights[named].sum())
    for cluster in named:
        # its own rounding, and its share of the remainder
        assert abs(float(again[cluster]) - float(weights[cluster])) <= lost + 2.5 / 255
    assert np.abs(again - weights).sum() <= 2 * lost + 2 * NAMED / 255


@given(simplex(12), st.integers(1, 5))
def test_what_few_clusters_hold_comes_back_but_for_rounding(shares: Any, count: int) -> None:
    weights = np.zeros(12)
    weights[:count] = 1 / count
    if count <= NAMED:
        assert unpack(pack(weights).tolist(), shares) == pytest.approx(weights, abs=(1 + NAMED / 2) / 255)


def test_many_signatures_are_packed_at_once_as_each_alone() -> None:
    weights = np.random.default_rng(2).dirichlet(np.ones(9), size=(3, 5))
    packed = pack(weights)
    assert packed.shape == (3, 5, PACKED)
    assert all((packed[at] == pack(weights[at])).all() for at in np.ndindex(3, 5))


@given(st.lists(st.integers(0, 255), min_size=PACKED, max_size=PACKED), simplex(7))
def test_any_bytes_unpack_to_a_distribution(packed: list[int], shares: Any) -> None:
    again = unpack(packed, shares.copy())
    assert (again >= -1e-6).all()
    assert again.sum() == pytest.approx(1.0, abs=1e-5)


def test_what_nobody_is_named_for_goes_to_all_by_their_shares() -> None:
    shares = np.array([0.5, 0.3, 0.2], np.float32)
    assert unpack([0] * PACKED, shares).tolist() == shares.tolist()
    half = unpack([2, 102, 0, 0, 0, 0, 0, 0], shares)  # 0.4 named
    assert half == pytest.approx(0.6 * shares + np.array([0, 0, 0.4]))
    assert unpack([9, 255, 0, 0, 0, 0, 0, 0], shares) == pytest.approx(shares), (
        "a cluster that is no more says nothing"
    )


def model(sharpness: float = 0.5) -> ClusterModel:
    rng = np.random.default_rng(4)
    profiles = rng.dirichlet(np.ones(6) * 0.5, size=(3, 2)).astype(np.float32)
    return ClusterModel(8, profiles, np.array([0.2, 0.3, 0.5], np.float32), sharpness)


def test_no_counts_say_nothing_and_more_of_the_same_say_more() -> None:
    clusters = model()
    assert clusters.signature(np.zeros((2, 6))) == pytest.approx(clusters.shares)
    wanted = clusters.profiles[1]
    weights = [float(clusters.signature(wanted * tokens)[1]) for tokens in (1, 4, 16, 64)]
    assert weights == sorted(weights)
    assert weights[-1] > 0.99


def test_a_signature_is_the_tempered_posterior_of_its_counts() -> None:
    clusters = model(0.3)
    counts = np.random.default_rng(1).integers(0, 5, size=(4, 2, 6))
    for at in range(4):
        likely = clusters.shares * np.exp(
            0.3 * (counts[at] * np.log(clusters.profiles / clusters.mean)).sum(axis=(1, 2))
        )
        assert clusters.signature(counts)[at] == pytest.approx(likely / likely.sum(), rel=1e-4)


def test_a_cluster_without_a_share_is_never_found() -> None:
    weights = posterior(np.array([0.0, 1.0], np.float32), np.array([500.0, 0.0]))
    assert weights.tolist() == [0.0, 1.0]
    assert posterior(np.array([0.5, 0.5], np.float32), np.array([[5000.0, 0.0], [0.0, 0.0]])).tolist() == [
        [1.0, 0.0],
        [0.5, 0.5],
    ]


@given(st.integers(1, 500), st.integers(0, 1000))
def test_pairs_of_a_long_text_speak_less_each(copies: int, seed: int) -> None:
    """n pairs carry the evidence of n / (1 + saturation * n), in any combination with other evidence."""
    plain, counts = model(), np.random.default_rng(seed).integers(0, 5, model().mean.shape)
    tempered = ClusterModel(plain.version, plain.profiles, plain.shares, plain.sharpness, saturation=0.01)
    many = copies * counts
    equal = posterior(
        plain.shares, plain.sharpness * many.ravel() / (1 + 0.01 * many.sum()) @ plain.log_ratios
    )
    assert tempered.signature(many) == pytest.approx(equal, abs=1e-5)
    assert tempered.signature(np.stack([many, counts]))[0] == pytest.approx(equal, abs=1e-5)


def test_a_saturation_that_cannot_be_is_refused() -> None:
    for saturation in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="saturation"):
            ClusterModel.from_record(msgspec.structs.replace(model().record(), saturation=saturation))


def test_expected_profiles_are_mixtures() -> None:
    clusters = model()
    assert clusters.expected(clusters.shares) == pytest.approx(clusters.mean, rel=1e-5)
    assert (clusters.expected(np.array([0, 1, 0], np.float32)) == clusters.profiles[1]).all()


def test_a_model_comes_through_the_bus_within_half_precision() -> None:
    clusters = model()
    again = ClusterModel.from_record(
        msgspec.msgpack.decode(msgspec.msgpack.encode(clusters.record()), type=type(clusters.record()))
    )
    assert again.version == 8
    assert again.sharpness == 0.5
    assert again.shares == pytest.approx(clusters.shares)
    assert again.profiles == pytest.approx(clusters.profiles, rel=2e-3, abs=1e-6)
    assert again.profiles.sum(axis=2) == pytest.approx(np.ones((3, 2)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clusters": 0, "shares": b"", "profiles": b""}, "0 clusters"),
        ({"clusters": 4}, "4 clusters"),
        ({"clusters": MAX_CLUSTERS + 1, "shares": bytes(4 * (MAX_CLUSTERS + 1))}, "are allowed"),
        ({"layers": 3}, "do not make profiles"),
        ({"layers": 0, "profiles": b""}, "are allowed"),
        ({"layers": -1}, "are allowed"),
        ({"profiles": bytes(72)}, "must be probabilities"),
        ({"profiles": np.full(36, np.nan, "<f2").tobytes()}, "must be probabilities"),
        ({"profiles": np.full(36, -1, "<f2").tobytes()}, "must be probabilities"),
        ({"shares": np.array([1, np.inf, 1], "<f4").tobytes()}, "shares must be"),
        ({"shares": np.array([1, -1, 1], "<f4").tobytes()}, "shares must be"),
        ({"shares": bytes(12)}, "shares must be"),
        ({"shares": b"12345"}, "bytes of shares"),
        ({"sharpness": 0.0}, "sharpness"),
        ({"sharpness": float("nan")}, "sharpness"),
        ({"sharpness": float("inf")}, "sharpness"),
    ],
)
def test_nonsense_is_refused_with_its_reason(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterModel.from_record(msgspec.structs.replace(model().record(), **wrong))


def test_shares_too_large_for_their_sum_in_single_precision_are_read() -> None:
    found = ClusterModel.from_record(
        msgspec.structs.replace(model().record(), shares=np.array([3e38, 3e38, 3e38], "<f4").tobytes())
    )
    assert found.shares == pytest.approx(np.full(3, 1 / 3))


@pytest.mark.parametrize("numbers", ["nan", "signalling", "inf"])
@pytest.mark.parametrize("field", ["shares", "profiles"])
def test_values_that_are_no_numbers_are_refused(field: str, numbers: str) -> None:
    record = model().record()
    kind, bits = (np.uint32, "<f4") if field == "shares" else (np.uint16, "<f2")
    patterns = {
        "shares": {"nan": 0x7FC00000, "signalling": 0x7F800001, "inf": 0x7F800000},
        "profiles": {"nan": 0x7E00, "signalling": 0x7C01, "inf": 0x7C00},
    }
    values = np.frombuffer(getattr(record, field), bits).copy()
    values.view(kind)[0] = patterns[field][numbers]
    with pytest.raises(ValueError, match=f"{field} must be probabilities"):
        ClusterModel.from_record(msgspec.structs.replace(record, **{field: values.tobytes()}))


@settings(max_examples=200)
@given(
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.integers(-1, 70),
    st.floats(),
    st.binary(max_size=300),
    st.binary(max_size=300),
)
def test_arbitrary_records_are_read_or_refused_and_nothing_else(
    layers: int, experts: int, count: int, sharpness: float, shares: bytes, profiles: bytes
) -> None:
    record = msgspec.structs.replace(
        model().record(),
        layers=layers,
        experts=experts,
        clusters=count,
        sharpness=sharpness,
        shares=shares,
        profiles=profiles,
    )
    try:
        found = ClusterModel.from_record(record)
    except ValueError:
        return
    assert np.isfinite(found.profiles).all()
    assert found.shares.sum() == pytest.approx(1.0)


def test_weights_that_were_all_rounded_up_are_unpacked_from_bytes_and_from_arrays_alike() -> None:
    packed = np.array([0, 64, 1, 64, 2, 64, 3, 65], np.uint8)
    shares = np.full(4, 0.25, np.float32)
    assert unpack(packed, shares) == pytest.approx(unpack(packed.tobytes(), shares), abs=1e-7)
    assert unpack(packed, shares).sum() == pytest.approx(1.0, abs=1e-6)
