"""Placements: conservation, digests, and what a damaged file is told."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import PlacementError
from shared.core.placement import (
    PlacedNode,
    Placement,
    Tier,
    balanced,
    check,
    contiguous,
    decode,
    encode,
    shuffled,
)
from shared.core.shape import ExpertShape, ModelShape

NODES: list[tuple[str, Tier, float]] = [
    ("hbm", "hbm", 2.0),
    ("grace", "grace", 1.0),
    ("s0", "spark", 1.0),
]
TINY = ModelShape(3, 1, 8, 2, ExpertShape(latent=16, width=16))


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """Small models with any number of dense layers first."""
    layers = draw(st.integers(1, 6))
    return ModelShape(
        layers=layers,
        first_moe_layer=draw(st.integers(0, layers - 1)),
        experts=draw(st.integers(1, 40)),
        top_k=draw(st.integers(1, 4)),
        expert=ExpertShape(latent=16, width=16),
    )


weights = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=7)


def placed_once(placement: Placement) -> None:
    shape = placement.shape
    keys = [key for node in placement.nodes for key in node.rows]
    assert len(keys) == len(set(keys)) == shape.routed_experts
    owner, row = placement.homes()
    for index, node in enumerate(placement.nodes):
        for at, (layer, expert) in enumerate(node.rows):
            assert (owner[layer, expert], row[layer, expert]) == (index, at)
    assert (owner[: shape.first_moe_layer] == -1).all()


@settings(max_examples=60, deadline=None)
@given(shape=models(), shares=weights, seed=st.integers(0, 2**32 - 1))
def test_every_policy_places_every_expert_once(
    shape: ModelShape, shares: list[float], seed: int
) -> None:
    """Conservation (case N3): any shape, any weights, any policy; homes() is its inverse."""
    nodes: list[tuple[str, Tier, float]] = [
        (f"n{index}", "spark", share) for index, share in enumerate(shares)
    ]
    placed_once(balanced("digest", shape, nodes))
    placed_once(contiguous("digest", shape, nodes))
    placed_once(shuffled("digest", shape, nodes, seed=seed))


@settings(max_examples=40, deadline=None)
@given(shape=models(), shares=weights)
def test_balanced_gives_each_node_its_share_of_each_layer(
    shape: ModelShape, shares: list[float]
) -> None:
    """Per layer, a node holds its proportional number of experts, give or take one."""
    nodes: list[tuple[str, Tier, float]] = [
        (f"n{index}", "spark", share) for index, share in enumerate(shares)
    ]
    placement = balanced("digest", shape, nodes)
    for node, share in zip(placement.nodes, shares, strict=True):
        fair = shape.experts * share / sum(shares)
        for layer in shape.moe_layers:
            held = sum(1 for key in node.rows if key[0] == layer)
            assert abs(held - fair) <= 1


@settings(max_examples=80, deadline=None)
@given(shape=models(), shares=weights, seed=st.integers(0, 2**32 - 1))
def test_partial_sums_of_the_places_make_the_dense_layer(
    shape: ModelShape, shares: list[float], seed: int
) -> None:
    """Case N3: random tier maps; the union of per-place integer sums equals the dense sum."""
    nodes: list[tuple[str, Tier, float]] = [
        (f"n{index}", "spark", share) for index, share in enumerate(shares)
    ]
    owner, row = shuffled("digest", shape, nodes, seed=seed).homes()
    rng = np.random.default_rng(seed)
    value = rng.integers(1, 1000, (shape.layers, shape.experts))
    layer = int(rng.integers(shape.first_moe_layer, shape.layers))
    chosen = rng.integers(0, shape.experts, (5, shape.top_k))

    banks = [
        np.array([value[key] for key in node.rows])
        for node in shuffled("digest", shape, nodes, seed=seed).nodes
    ]
    partial = np.zeros(5, np.int64)
    for place in range(len(nodes)):
        here = owner[layer, chosen] == place
        rows = row[layer, chosen]
        for token, slot in np.argwhere(here):
            partial[token] += banks[place][rows[token, slot]]

    assert (partial == value[layer, chosen].sum(axis=1)).all()


def test_bytes_round_trip_and_decide_the_digest() -> None:
    """Equal placements have equal bytes and digests; a moved expert changes the digest."""
    placement = balanced("digest", TINY, NODES)
    again = decode(encode(placement), source="p.json")

    assert again == placement
    assert again.digest == placement.digest
    assert contiguous("digest", TINY, NODES).digest != placement.digest
    assert balanced("other", TINY, NODES).digest != placement.digest
    assert shuffled("d", TINY, NODES, seed=1).digest == shuffled("d", TINY, NODES, seed=1).digest


def test_an_unknown_node_is_named_with_the_known_ones() -> None:
    """Asking for a node the placement lacks lists those it has."""
    with pytest.raises(PlacementError, match=r"no node 'spark9'.*hbm, grace, s0"):
        balanced("digest", TINY, NODES).node("spark9")


def spoiled(change: str) -> bytes:
    """The tiny placement with one defect."""
    file = json.loads(encode(with_copies()))
    data = file["placement"]
    first = data["nodes"][0]["rows"]
    match change:
        case "dropped":
            first.pop()
        case "twice":
            first.append(first[0])
        case "dense layer":
            first[0] = [0, 0]
        case "negative":
            first[0] = [1, -1]
        case "expert beyond":
            first[0] = [1, 8]
        case "same names":
            data["nodes"][1]["name"] = data["nodes"][0]["name"]
        case "huge":
            data["shape"]["layers"] = 2**20
            data["shape"]["experts"] = 2**16 - 1
        case "extra field":
            data["colour"] = "red"
        case "version":
            data["version"] = 3
        case "name":
            data["nodes"][0]["name"] = "../etc"
        case "copy at home":
            data["nodes"][0]["copies"].append(first[0])
        case "copy twice":
            data["nodes"][0]["copies"] *= 2
        case "copy beyond":
            data["nodes"][0]["copies"][0] = [1, 8]
    with contextlib.suppress(msgspec.ValidationError):  # else nobody gets as far as the checksum
        file["checksum"] = msgspec.convert(data, Placement).digest
    return json.dumps(file).encode()


def with_copies() -> Placement:
    """The tiny placement; the first node has copies of two experts of each other node."""
    placement = balanced("digest", TINY, NODES)
    hbm, *others = placement.nodes
    copies = tuple(key for node in others for key in node.rows[:2])
    nodes = (msgspec.structs.replace(hbm, copies=copies), *others)
    return msgspec.structs.replace(placement, nodes=nodes, trace_digest="t" * 64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dropped", "not placed exactly once"),
        ("twice", "placed 2 times"),
        ("dense layer", "outside layers"),
        ("negative", "outside layers"),
        ("expert beyond", "outside layers"),
        ("same names", "repeat"),
        ("huge", "exceed"),
        ("extra field", "not a placement"),
        ("version", "not a placement"),
        ("name", "not a placement"),
        ("copy at home", "holds layer 1 expert . twice"),
        ("copy twice", "holds layer . expert . twice"),
        ("copy beyond", "outside layers"),
    ],
)
def test_a_defect_is_one_error_that_names_file_and_place(change: str, said: str) -> None:
    """Conservation is checked on reading (P1, P5); hostile sizes allocate nothing (case B12)."""
    with pytest.raises(PlacementError, match=said) as caught:
        decode(spoiled(change), source="p.json")
    assert "p.json" in str(caught.value)


def test_garbage_is_refused() -> None:
    """Bytes that are no JSON are a placement error, not a crash."""
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', b"NaN"):
        with pytest.raises(PlacementError):
            decode(data, source="p.json")


def test_check_counts_what_is_missing() -> None:
    """A placement built by hand is held to the same law."""
    with pytest.raises(PlacementError, match="16 experts are not placed exactly once"):
        check(Placement(2, "digest", TINY, "by hand", (PlacedNode("a", "spark", ()),)))


def test_copies_follow_the_rows_of_a_bank_and_change_no_home() -> None:
    """A node that ignores copies finds every expert where it was."""
    plain, placement = balanced("digest", TINY, NODES), with_copies()

    hbm = placement.node("hbm")
    assert len(hbm.copies) == 4
    assert hbm.bank_rows == plain.node("hbm").rows + hbm.copies
    for ours, theirs in zip(placement.homes(), plain.homes(), strict=True):
        assert (ours == theirs).all()
    assert placement.digest != plain.digest
    assert decode(encode(placement), source="p.json") == placement


def test_every_flipped_byte_is_refused() -> None:
    """A file is served from only as it was written, whichever byte was hit."""
    data = encode(with_copies())
    for at in range(len(data)):
        for bit in (0, 3, 5):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(PlacementError, match=r"p\.json"):
                decode(bytes(flipped), source="p.json")
    edited = data.replace(b'"balanced"', b'"balances"')
    with pytest.raises(PlacementError, match="checksum"):
        decode(edited, source="p.json")


def test_the_format_before_is_refused_with_a_remedy() -> None:
    """What an older version wrote has no copies and no checksum: it is not guessed at."""
    old = {"version": 1, "model_digest": "m", "shape": {}, "policy": "balanced", "nodes": []}
    with pytest.raises(PlacementError, match=r"format 1, this program reads 2.*k3 pod init"):
        decode(json.dumps(old).encode(), source="p.json")


def test_holders_are_the_home_then_copies_in_node_order() -> None:
    """Two copies of one expert, one of another; nobody else has any."""
    placed = balanced("digest", TINY, NODES)
    assert placed.holders().tolist() == [placed.homes()[0].tolist()]
    home, _ = placed.homes()
    first, second = placed.nodes[0].rows[:2]
    nodes = (
        placed.nodes[0],
        msgspec.structs.replace(placed.nodes[1], copies=(first,)),
        msgspec.structs.replace(placed.nodes[2], copies=(second, first)),
    )
    copied = msgspec.structs.replace(placed, nodes=nodes)
    check(copied)

    holders = copied.holders()
    assert holders.shape == (3, *home.shape)
    assert holders[:, *first].tolist() == [0, 1, 2]
    assert holders[:, *second].tolist() == [0, 2, -1]
    assert np.count_nonzero(holders[1:] != -1) == 3


def test_costs_travel_with_the_file_and_are_bounded() -> None:
    """What the plan reckoned with is in the file and its checksum; nonsense is refused."""
    placed = balanced("digest", TINY, NODES)
    assert not placed.has_costs
    nodes = tuple(msgspec.structs.replace(node, per_expert_us=84.5) for node in placed.nodes)
    costly = msgspec.structs.replace(placed, nodes=nodes)

    assert costly.has_costs
    assert decode(encode(costly), source="x") == costly
    assert costly.digest != placed.digest
    for wrong in (-1.0, 1e12):
        bad = (msgspec.structs.replace(placed.nodes[0], fixed_us=wrong), *placed.nodes[1:])
        with pytest.raises(PlacementError, match="fixed_us"):
            decode(encode(msgspec.structs.replace(placed, nodes=bad)), source="x")
