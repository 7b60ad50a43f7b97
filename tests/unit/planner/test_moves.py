"""Moves between placements: the fewest, in an order that never overfills a node or loses one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.assignment import Assignment
from services.planner.keep import keep_nodes, keep_rows
from services.planner.moves import Move, MovePlan, apply_moves, plan_moves
from services.planner.policies import Kind
from shared.core.errors import PlacementError
from shared.core.placement import ExpertKey, PlacedNode, Placement
from tests.unit.planner.small import shape_of

Held = dict[str, set[ExpertKey]]


def placement_of(
    nodes: dict[str, list[ExpertKey]],
    copies: dict[str, list[ExpertKey]] | None = None,
    *,
    layers: int,
    experts: int,
) -> Placement:
    """A placement with these rows; all nodes are Sparks."""
    copies = copies or {}
    return Placement(
        version=2,
        model_digest="m" * 32,
        shape=shape_of(layers, experts),
        policy="by hand",
        nodes=tuple(
            PlacedNode(name, "spark", tuple(rows), tuple(copies.get(name, [])))
            for name, rows in nodes.items()
        ),
    )


def planned(old: Placement, new: Placement, slots: list[int]) -> MovePlan:
    """Moves of records of 100 bytes at 50 bytes per second."""
    return plan_moves(old, new, slots, record_bytes=100, bytes_per_s=50)


def held(placement: Placement) -> Held:
    """What every node has."""
    return {node.name: set(node.bank_rows) for node in placement.nodes}


def test_full_nodes_exchange_through_staging() -> None:
    """Two nodes without a free row need space for one record, and say so."""
    old = placement_of({"a": [(1, 0), (1, 1)], "b": [(1, 2), (1, 3)]}, layers=1, experts=4)
    new = placement_of({"a": [(1, 2), (1, 1)], "b": [(1, 0), (1, 3)]}, layers=1, experts=4)

    plan = planned(old, new, [2, 2])

    assert plan.moves == (
        Move("stage", 1, 2, "b", ""),
        Move("move", 1, 0, "a", "b"),
        Move("unstage", 1, 2, "", "a"),
    )
    assert (plan.staging_records, plan.swaps, plan.bytes_moved) == (1, 1, 200)
    assert [(node.records_in, node.bytes_out, node.seconds) for node in plan.nodes] == [
        (1, 100, 2.0),
        (1, 100, 2.0),
    ]


def test_a_free_row_saves_the_staging() -> None:
    """The same exchange with one spare slot is two moves and needs no space beside the nodes."""
    old = placement_of({"a": [(1, 0), (1, 1)], "b": [(1, 2), (1, 3)]}, layers=1, experts=4)
    new = placement_of({"a": [(1, 2), (1, 1)], "b": [(1, 0), (1, 3)]}, layers=1, experts=4)

    plan = planned(old, new, [2, 3])

    assert [move.step for move in plan.moves] == ["move", "move"]
    assert plan.staging_records == 0


def test_a_ring_of_three_full_nodes() -> None:
    """One record is staged, the others follow each other into the freed rows."""
    old = placement_of({"a": [(1, 0)], "b": [(1, 1)], "c": [(1, 2)]}, layers=1, experts=3)
    new = placement_of({"a": [(1, 2)], "b": [(1, 0)], "c": [(1, 1)]}, layers=1, experts=3)

    plan = planned(old, new, [1, 1, 1])

    assert sorted(move.step for move in plan.moves) == ["move", "move", "stage", "unstage"]
    assert plan.swaps == 1
    has = held(old)
    for _ in apply_moves(has, plan.moves):
        assert all(len(records) <= 1 for records in has.values())
    assert has == held(new)


def test_a_copy_that_becomes_the_home_does_not_travel() -> None:
    """A record is the same bytes in either role; what is not needed any more is dropped."""
    rows: dict[str, list[ExpertKey]] = {"a": [(1, 0), (1, 1)], "b": [(1, 2), (1, 3)]}
    old = placement_of(rows, {"b": [(1, 0)]}, layers=1, experts=4)
    new = placement_of({"a": [(1, 1)], "b": [(1, 0), (1, 2), (1, 3)]}, layers=1, experts=4)

    plan = planned(old, new, [3, 3])

    assert plan.moves == (Move("drop", 1, 0, "a", ""),)
    assert plan.bytes_moved == 0


def test_a_new_copy_leaves_the_original_where_it_is() -> None:
    """Only the target's row is filled."""
    rows: dict[str, list[ExpertKey]] = {"a": [(1, 0)], "b": [(1, 1)]}
    old = placement_of(rows, layers=1, experts=2)
    new = placement_of(rows, {"b": [(1, 0)]}, layers=1, experts=2)

    plan = planned(old, new, [1, 2])

    assert plan.moves == (Move("copy", 1, 0, "a", "b"),)
    assert [(node.bytes_in, node.bytes_out, node.seconds) for node in plan.nodes] == [
        (0, 100, 2.0),
        (100, 0, 2.0),
    ]


def test_refuses_what_does_not_belong_together() -> None:
    """Other nodes, another model, or more records than a node has room for."""
    one = placement_of({"a": [(1, 0)], "b": [(1, 1)]}, layers=1, experts=2)
    other_nodes = placement_of({"a": [(1, 0)], "c": [(1, 1)]}, layers=1, experts=2)
    other_model = placement_of({"a": [(1, 0)], "b": [(1, 1), (1, 2)]}, layers=1, experts=3)

    with pytest.raises(PlacementError, match="different nodes"):
        planned(one, other_nodes, [1, 1])
    with pytest.raises(PlacementError, match="different models"):
        planned(one, other_model, [2, 2])
    with pytest.raises(PlacementError, match="room for 0"):
        planned(one, one, [1, 0])


def test_carrying_out_refuses_moves_of_another_placement() -> None:
    """A source that has nothing, a target that has it, the last record dropped."""
    has: Held = {"a": {(1, 0)}, "b": set()}

    for move in (
        Move("move", 1, 0, "b", "a"),
        Move("copy", 1, 0, "a", "a"),
        Move("unstage", 1, 0, "", "b"),
        Move("drop", 1, 0, "a", ""),
    ):
        with pytest.raises(PlacementError):
            list(apply_moves({name: set(keys) for name, keys in has.items()}, [move]))


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[Placement, Placement, list[int]]:
    """Any two placements of one small model on the same nodes, with budgets that just hold both."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    nodes = draw(st.integers(2, 4))
    place = st.integers(0, nodes - 1)

    def one() -> Placement:
        rows: dict[str, list[ExpertKey]] = {f"n{index}": [] for index in range(nodes)}
        copies: dict[str, list[ExpertKey]] = {name: [] for name in rows}
        for layer in range(1, layers + 1):
            for expert in range(experts):
                home, copy = draw(place), draw(place)
                rows[f"n{home}"].append((layer, expert))
                if copy != home and draw(st.booleans()):
                    copies[f"n{copy}"].append((layer, expert))
        return placement_of(rows, copies, layers=layers, experts=experts)

    old, new = one(), one()
    spare = draw(st.integers(0, 1))
    slots = [
        max(len(a.bank_rows), len(b.bank_rows)) + spare
        for a, b in zip(old.nodes, new.nodes, strict=True)
    ]
    return old, new, slots


@settings(max_examples=150, deadline=None)
@given(two_placements())
def test_moves_lead_from_old_to_new(given_: tuple[Placement, Placement, list[int]]) -> None:
    """They end at the new placement, never overfill a node, never lose an expert, never travel
    twice; staging holds at most one record. Equal placements need nothing (P2)."""
    old, new, slots = given_

    plan = planned(old, new, slots)

    has = held(old)
    everyone = set().union(*has.values())
    peak = 0
    for staged in apply_moves(has, plan.moves):
        assert all(len(has[node.name]) <= slot for node, slot in zip(old.nodes, slots, strict=True))
        assert len(everyone - set().union(*has.values())) <= staged
        peak = max(peak, staged)
    assert has == held(new)
    assert peak == plan.staging_records <= 1
    fewest = sum(len(held(new)[name] - held(old)[name]) for name in has)
    assert sum(node.records_in for node in plan.nodes) == fewest
    assert plan.bytes_moved == 100 * fewest
    assert planned(old, old, slots).moves == ()


@st.composite
def two_assignments(
    draw: st.DrawFn,
) -> tuple[Assignment, Assignment, list[Kind], np.ndarray]:
    """Two assignments with copies on one fast node and like Sparks, within bounds per layer."""
    layers, experts, sparks = draw(st.integers(1, 4)), draw(st.integers(4, 10)), 3
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bound = -(-experts // sparks) + draw(st.integers(0, 2))
    made = []
    for _ in range(2):
        home = np.zeros((layers, experts), np.int16)
        copy = np.full((layers, experts), -1, np.int16)
        for layer in range(layers):
            order = rng.permutation(experts)
            fast = int(rng.integers(0, experts))
            slow = order[fast:]
            home[layer, slow] = 1 + rng.permutation(len(slow)) % sparks
            for expert in order[: int(rng.integers(0, fast + 1))]:
                spark = int(rng.integers(1, sparks + 1))
                if np.count_nonzero(home[layer] == spark) + np.count_nonzero(
                    copy[layer] == spark
                ) < min(bound, experts):
                    copy[layer, expert] = spark
        made.append((home, copy))
    slots = [layers * experts] + [bound * layers] * sparks
    old, new = (Assignment.without_copies(home, slots).with_copies(copy) for home, copy in made)
    layer_max = np.array([experts] + [bound] * sparks)
    kinds = [Kind("hbm", 8.0, 0.0, (0,)), Kind("spark", 84.5, 184.5, (1, 2, 3))]
    return old, new, kinds, layer_max


@settings(max_examples=150, deadline=None)
@given(two_assignments())
def test_what_stays_in_its_tier_stays_on_its_node(
    given_: tuple[Assignment, Assignment, list[Kind], np.ndarray],
) -> None:
    """Every kind has what the new plan gives it; no record changes between like nodes."""
    old, new, kinds, layer_max = given_

    kept = keep_nodes(old, new, kinds, layer_max)

    kept.check(layer_max=layer_max)
    for ours, theirs in ((kept.home, new.home), (kept.copy, new.copy)):
        assert ((ours > 0) == (theirs > 0)).all()
        assert ((ours == 0) == (theirs == 0)).all()
    for layer, expert in np.ndindex(*old.home.shape):
        before = {int(old.home[layer, expert]), int(old.copy[layer, expert])} & {1, 2, 3}
        after = {int(kept.home[layer, expert]), int(kept.copy[layer, expert])} & {1, 2, 3}
        assert len(before & after) == min(len(before), len(after))
    same = keep_nodes(old, old, kinds, layer_max)
    assert (same.home == old.home).all()
    assert (same.copy == old.copy).all()


def test_a_newcomer_goes_where_its_layer_is_thinnest() -> None:
    """Sparks share a layer evenly, so the slowest of them stays fast; room comes second."""
    kinds = [Kind("hbm", 8.0, 0.0, (0,)), Kind("spark", 84.5, 184.5, (1, 2))]
    old = Assignment.without_copies(np.array([[0, 1, 1, 2]], np.int16), [4, 9, 2])
    new = Assignment.without_copies(np.array([[1, 2, 1, 1]], np.int16), [4, 9, 2])

    kept = keep_nodes(old, new, kinds, np.array([4, 4, 4]))

    assert kept.home.tolist() == [[2, 1, 1, 2]]


def test_home_and_copy_of_a_newcomer_are_on_two_nodes() -> None:
    """P1, although one node is the thinnest for both."""
    kinds = [Kind("hbm", 8.0, 0.0, (0,)), Kind("spark", 84.5, 184.5, (1, 2))]
    old = Assignment.without_copies(np.array([[0, 2, 2, 2]], np.int16), [4, 4, 4])
    new = Assignment.without_copies(np.array([[1, 2, 2, 2]], np.int16), [4, 4, 4])
    new = new.with_copies(np.array([[2, -1, -1, -1]]))

    kept = keep_nodes(old, new, kinds, np.array([4, 4, 4]))

    assert (kept.home[0, 0], kept.copy[0, 0]) == (1, 2)


def test_without_room_beside_those_that_stay_the_new_plan_is_taken() -> None:
    """Node 1 may take more of layer 0 but is full, node 2 has rows but layer 0 is at its bound."""
    kinds = [Kind("hbm", 8.0, 0.0, (0,)), Kind("spark", 84.5, 184.5, (1, 2))]
    old = Assignment.without_copies(np.array([[0, 2, 2], [1, 1, 0]], np.int16), [2, 2, 3])
    new = Assignment.without_copies(np.array([[1, 2, 2], [1, 2, 0]], np.int16), [2, 2, 3])

    kept = keep_nodes(old, new, kinds, np.array([3, 2, 2]))

    assert kept.home.tolist() == new.home.tolist()


def test_rows_stay_where_a_bank_without_holes_allows() -> None:
    """A row that became free is filled; only what lies beyond the new end must move up."""
    old = placement_of(
        {"a": [(1, 0), (1, 1), (1, 2), (1, 3)], "b": [(1, 4), (1, 5)]}, layers=1, experts=6
    )
    new = placement_of(
        {"a": [(1, 0), (1, 2), (1, 3)], "b": [(1, 1), (1, 4), (1, 5)]}, layers=1, experts=6
    )

    kept = keep_rows(old, new)

    assert kept.nodes[0].rows == ((1, 0), (1, 3), (1, 2))
    assert kept.nodes[1].rows == ((1, 4), (1, 5), (1, 1))
    assert [node.rows_changed for node in planned(old, kept, [4, 4]).nodes] == [1, 0]
    assert keep_rows(old, old) == old


def test_rows_are_all_that_changes() -> None:
    """Policy, routing and costs are those of the new plan."""
    old = placement_of({"a": [(1, 0)], "b": [(1, 1)]}, layers=1, experts=2)
    nodes = tuple(msgspec.structs.replace(node, per_expert_us=53.0) for node in old.nodes)
    new = msgspec.structs.replace(old, policy="measured", trace_digest="t", nodes=nodes)

    assert keep_rows(old, new) == new
