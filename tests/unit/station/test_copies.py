"""Which holder computes a pair: the planner's own choice, and never one that does not serve."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import policies
from services.planner.cost import PlaceCosts
from services.planner.score import place_counts
from shared.core.copy_choice import choose_copies, choose_of_token, place_table
from shared.core.placement import Placement, check, decode, encode, shuffled
from shared.core.shape import ExpertShape, ModelShape
from station.copies import Copies
from tests.unit.planner.small import routing, shape_of, usual_pod
from tests.unit.planner.test_score import with_random_copies

US = st.sampled_from([0.0, 8.0, 53.0, 84.5, 93.0, 184.5])
SHAPE = ModelShape(3, 1, 20, 6, ExpertShape(latent=16, width=16))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_one_token_is_chosen_as_the_planner_chooses(data: st.DataObject) -> None:
    """Any homes, copies and costs: the loop for one token is the rule in numpy."""
    places, top_k = data.draw(st.integers(2, 11)), data.draw(st.integers(1, 16))
    fixed, each = (data.draw(st.lists(US, min_size=places, max_size=places)) for _ in range(2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    homes = rng.integers(0, places, (1, top_k)).astype(np.int16)
    copies = rng.integers(-1, places, (1, top_k)).astype(np.int16)
    copies[copies == homes] = -1

    chosen = choose_of_token(homes[0].tolist(), copies[0].tolist(), place_table(fixed, each, top_k))
    expected = choose_copies(homes, copies, np.array(fixed), np.array(each))
    assert chosen == expected[0].tolist()


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_a_pod_chooses_what_the_plan_was_scored_with(tokens: int) -> None:
    """From assignment to placement file to Station: experts per place of every token-layer."""
    pod, ledger, _ = usual_pod(layers=3, experts=24)
    shape = shape_of(3, 24, top_k=8)
    trace = routing(shape, tokens=128)
    assignment = with_random_copies(policies.plan("cost-ranked", trace.histogram(), pod, ledger), 5)
    placement = decode(
        encode(assignment.to_placement(pod, shape, model_digest="m", policy="p", trace_digest="")),
        source="test",
    )
    copies = Copies(placement)
    copies.serve(range(len(pod.nodes)))

    counts = place_counts(trace, assignment, PlaceCosts.of(pod.nodes))
    moved = 0
    for index, layer in enumerate(shape.moe_layers):
        assert copies.is_in(layer)
        for start in range(0, trace.tokens, tokens):
            ids = trace.ids[start : start + tokens, index].astype(np.int64)
            places = copies.choose(layer, ids).reshape(ids.shape)
            for line, expected in zip(places, counts[start : start + tokens, index], strict=True):
                assert np.bincount(line, minlength=len(pod.nodes)).tolist() == expected.tolist()
            moved += int((places != copies.home[layer][ids]).sum())
    assert moved > 0, "copies are in use"


def with_copies(seed: int, *, places: int, costs: bool) -> Placement:
    """Random homes; each expert of layer 1 has up to two copies, none of layer 2."""
    rng = np.random.default_rng(seed)
    placed = shuffled("m", SHAPE, [(f"n{i}", "spark", 1.0) for i in range(places)], seed=seed)
    home, _ = placed.homes()
    held: list[list[tuple[int, int]]] = [[] for _ in range(places)]
    for layer, expert in ((1, e) for e in range(SHAPE.experts)):
        others = [p for p in range(places) if p != home[layer, expert]]
        for place in rng.permutation(others)[: rng.integers(0, 3)]:
            held[place].append((layer, expert))
    nodes = tuple(
        msgspec.structs.replace(
            node,
            copies=tuple(held[place]),
            fixed_us=float(rng.choice([0.0, 93.0, 184.5])) * costs,
            per_expert_us=float(rng.choice([8.0, 53.0, 84.5])) * costs,
        )
        for place, node in enumerate(placed.nodes)
    )
    placement = msgspec.structs.replace(placed, nodes=nodes)
    check(placement)
    return placement


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    places=st.integers(2, 6),
    tokens=st.integers(1, 64),
    costs=st.booleans(),
    data=st.data(),
)
def test_every_pair_goes_to_one_holder_that_serves(
    seed: int, places: int, tokens: int, costs: bool, data: st.DataObject
) -> None:
    """Conservation, with any places down: a holder of the expert, and one that serves if one does;
    without costs the home if it serves, else the first copy that does."""
    placement = with_copies(seed, places=places, costs=costs)
    serving = data.draw(st.sets(st.integers(0, places - 1)))
    copies = Copies(placement)
    copies.serve(range(places))
    copies.serve(serving)
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(tokens)])

    assert not copies.is_in(2)
    for layer in SHAPE.moe_layers:
        chosen = copies.choose(layer, ids)
        assert chosen.shape == (ids.size,)
        for expert, place in zip(ids.reshape(-1).tolist(), chosen.tolist(), strict=True):
            holders = [
                int(copies.home[layer, expert]),
                *(p for p, node in enumerate(placement.nodes) if (layer, expert) in node.copies),
            ]
            up = [holder for holder in holders if holder in serving]
            assert place in (up or holders[:1])
            if not costs:
                assert place == (up or holders)[0]


def test_each_holder_is_asked_once() -> None:
    """Whoever serves and was not asked comes next, home first; then nobody is left."""
    placement = with_copies(3, places=5, costs=False)
    copies = Copies(placement)
    copies.serve([0, 1, 2, 4])
    experts = np.arange(SHAPE.experts)
    asked = np.zeros((len(experts), 5), np.bool_)
    order: list[list[int]] = [[] for _ in experts]
    for _ in range(4):
        other = copies.other(1, experts, asked)
        for expert in np.flatnonzero(other >= 0).tolist():
            order[expert].append(int(other[expert]))
            asked[expert, other[expert]] = True
    assert (copies.other(1, experts, asked) == -1).all()
    for expert, places in enumerate(order):
        holders = [int(copies.home[1, expert])]
        holders += [p for p, node in enumerate(placement.nodes) if (1, expert) in node.copies]
        assert places == [holder for holder in holders if holder != 3]
    assert max(map(len, order)) == 3


def test_rows_are_copies_where_the_expert_does_not_live() -> None:
    """Of what a place holds, its own experts are none."""
    placement = with_copies(3, places=3, costs=False)
    copies = Copies(placement)
    for place, node in enumerate(placement.nodes):
        own = np.array([expert for layer, expert in node.rows if layer == 1])
        copied = np.array([expert for _, expert in node.copies])
        experts = np.concatenate([own, copied])
        marks = copies.are_copies(1, experts, np.full(len(experts), place, np.int32))
        assert marks.tolist() == [False] * len(own) + [True] * len(copied)
