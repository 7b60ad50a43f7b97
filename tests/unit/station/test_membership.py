"""Membership: who serves, under which epoch, and what ends it."""

from __future__ import annotations

import msgspec
import pytest

from shared.core import lease as leases
from shared.core.lease import LeaseState
from shared.core.placement import Placement, balanced
from shared.core.shape import ExpertShape, ModelShape
from shared.core.wire import PROTOCOL_VERSION, BankFacts, Hello, Loading
from station.membership import (
    LOADING_US_MAX,
    MISSES_TO_LOSE,
    Acknowledge,
    CanaryJudged,
    Fence,
    Grant,
    HeartbeatCame,
    HelloCame,
    LayerMissed,
    LayerServed,
    LoadingCame,
    LoadingEnded,
    LoadReport,
    Membership,
    NodeEnded,
    Offer,
    Refuse,
    TimePassed,
)

SHAPE = ModelShape(
    layers=3, first_moe_layer=1, experts=8, top_k=2, expert=ExpertShape(latent=16, width=16)
)
KERNEL = 77


@pytest.fixture
def placement() -> Placement:
    """Two sparks beside the Station's own tier."""
    return balanced(
        "model", SHAPE, [("hbm", "hbm", 1.0), ("spark0", "spark", 1.0), ("spark1", "spark", 1.0)]
    )


@pytest.fixture
def members(placement: Placement) -> Membership:
    """Nobody has joined."""
    return Membership(placement=placement, kernel_id=KERNEL, last_epoch=100)


def hello(placement: Placement, node: str = "spark0", **changes: object) -> Hello:
    """A node's right Hello, with changes."""
    facts = BankFacts(
        name=node,
        model_digest=placement.model_digest,
        placement_digest=placement.digest,
        shape=SHAPE.expert,
        rows=len(placement.node(node).rows) if node.startswith("spark") else 1,
    )
    right = Hello(
        sender=node,
        incarnation=1,
        protocol=PROTOCOL_VERSION,
        tier="spark",
        pid=1,
        bank=facts,
        kernel_id=KERNEL,
        kernel_name="int16",
    )
    bank = {name[5:]: value for name, value in changes.items() if name.startswith("bank_")}
    rest = {name: value for name, value in changes.items() if not name.startswith("bank_")}
    return msgspec.structs.replace(right, bank=msgspec.structs.replace(facts, **bank), **rest)


def join(members: Membership, node: str = "spark0", now_us: int = 0) -> int:
    """Hello to grant; the epoch."""
    actions = members.apply(HelloCame(hello(members.placement, node), now_us))
    offer = actions[-1]
    assert isinstance(offer, Offer)
    granted = members.apply(CanaryJudged(node, offer.epoch, right=True, now_us=now_us))
    assert granted == [Grant(node, offer.epoch)]
    return offer.epoch


def test_a_node_joins_under_a_fresh_epoch(members: Membership) -> None:
    """Epochs only grow, over all nodes."""
    assert (join(members, "spark0"), join(members, "spark1")) == (101, 102)


def test_a_returning_node_gets_a_higher_epoch_and_the_old_is_fenced(members: Membership) -> None:
    """Case L2: a second Hello ends the first lease before the new one begins."""
    first = join(members)

    actions = members.apply(HelloCame(hello(members.placement), now_us=5))

    assert actions[0] == Fence("spark0", first, "the node started again")
    assert isinstance(actions[1], Offer)
    assert actions[1].epoch > first


def test_a_second_process_of_a_name_waits_for_the_first(members: Membership) -> None:
    """Two living nodes of one name must not take the lease from each other for ever."""
    epoch = join(members)
    other = hello(members.placement, incarnation=2)

    (refuse,) = members.apply(HelloCame(other, 5))

    assert isinstance(refuse, Refuse)
    assert (refuse.code, refuse.permanent) == ("name_taken", False)
    assert members.leases["spark0"].epoch == epoch
    members.apply(NodeEnded("spark0", epoch, "its connection closed"))
    (offer,) = members.apply(HelloCame(other, 6))
    assert isinstance(offer, Offer)
    assert offer.epoch > epoch


def test_messages_of_an_old_lease_change_nothing(members: Membership) -> None:
    """A late heartbeat, canary or goodbye of an ended lease is never obeyed."""
    old = join(members)
    new = join(members)

    assert members.apply(NodeEnded("spark0", old, "late goodbye")) == []
    assert members.apply(CanaryJudged("spark0", old, right=True, now_us=9)) == []
    assert members.apply(LayerMissed("spark0", old)) == []
    assert members.apply(HeartbeatCame("spark0", old, 9)) == [
        Fence("spark0", old, "this lease is over")
    ]
    assert members.leases["spark0"].epoch == new
    assert members.leases["spark0"].state is LeaseState.SERVING


def test_silence_ends_a_lease(members: Membership) -> None:
    """Heartbeats renew, time ends."""
    epoch = join(members)
    assert members.apply(HeartbeatCame("spark0", epoch, leases.TTL_US - 1)) == [
        Acknowledge("spark0", epoch)
    ]

    assert members.apply(TimePassed(leases.TTL_US)) == []
    fenced = members.apply(TimePassed(2 * leases.TTL_US))

    assert fenced == [Fence("spark0", epoch, "no heartbeat in time")]
    assert members.apply(TimePassed(9 * leases.TTL_US)) == []


def test_an_offer_without_a_canary_runs_out(members: Membership) -> None:
    """A node that never proves its kernel never serves."""
    members.apply(HelloCame(hello(members.placement), 0))

    fenced = members.apply(TimePassed(leases.CANARY_US))

    assert fenced == [Fence("spark0", 101, "no canary row in time")]


def test_a_wrong_canary_gets_no_experts(members: Membership) -> None:
    """Case N9: the lease ends and the node hears why."""
    members.apply(HelloCame(hello(members.placement), 0))

    fence, refuse = members.apply(CanaryJudged("spark0", 101, right=False, now_us=1))

    assert fence == Fence("spark0", 101, "wrong canary row")
    assert isinstance(refuse, Refuse)
    assert refuse.code == "canary_failed"


def test_misses_in_a_row_lose_a_node_and_an_answer_forgives(members: Membership) -> None:
    """A slow node is lost only when it never answers in between."""
    epoch = join(members)
    for _ in range(MISSES_TO_LOSE - 1):
        assert members.apply(LayerMissed("spark0", epoch)) == []
    members.apply(LayerServed("spark0", epoch))
    for _ in range(MISSES_TO_LOSE - 1):
        assert members.apply(LayerMissed("spark0", epoch)) == []

    (fence,) = members.apply(LayerMissed("spark0", epoch))

    assert isinstance(fence, Fence)
    assert "deadlines" in fence.reason


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"protocol": 99}, "remote_protocol_error", "99"),
        ({"sender": "stranger"}, "placement_invalid", "stranger"),
        ({"tier": "rtx"}, "placement_invalid", "rtx"),
        ({"sender": "hbm", "tier": "hbm"}, "placement_invalid", "no experts"),
        ({"bank_model_digest": "other"}, "digest_mismatch", "build the bank again"),
        ({"bank_placement_digest": "other"}, "digest_mismatch", "placement"),
        ({"bank_rows": 1}, "digest_mismatch", "placement"),
        ({"kernel_id": 5}, "config_invalid", "kernel"),
    ],
)
def test_what_does_not_belong_is_refused_for_good(
    members: Membership, change: dict[str, object], code: str, words: str
) -> None:
    """One clear refusal, and no epoch is spent on it."""
    (refuse,) = members.apply(HelloCame(hello(members.placement, **change), 0))

    assert isinstance(refuse, Refuse)
    assert (refuse.code, refuse.permanent) == (code, True)
    assert words in refuse.text
    assert members.last_epoch == 100


def loading(
    node: str = "spark0", done_bytes: int = 1, *, now_us: int = 0, incarnation: int = 1
) -> LoadingCame:
    """A node that says how far its bank is."""
    message = Loading(
        sender=node, incarnation=incarnation, phase="loading", done_bytes=done_bytes, total_bytes=9
    )
    return LoadingCame(message, now_us)


def test_a_load_is_remembered_and_decides_nothing(members: Membership) -> None:
    """The last report counts; no action follows, and no other node is touched."""
    assert members.apply(loading(done_bytes=1, now_us=5)) == []
    assert members.apply(loading(done_bytes=4, now_us=7)) == []
    members.apply(loading("spark1"))

    assert members.loads["spark0"] == LoadReport("loading", 4, 9, 7)
    assert members.leases == {}
    assert members.last_epoch == 100


def test_a_load_is_forgotten_when_its_node_joins_leaves_or_falls_silent(
    members: Membership,
) -> None:
    """Hello, departure, five seconds: none of them leaves a node loading for ever."""
    members.apply(loading())
    join(members)
    assert members.loads == {}

    members.apply(loading("spark1", now_us=10))
    members.apply(LoadingEnded("spark1"))
    assert members.loads == {}
    members.apply(LoadingEnded("spark1"))  # of a second connection

    members.apply(loading("spark1", now_us=10))
    members.apply(TimePassed(10 + LOADING_US_MAX))
    assert "spark1" in members.loads
    members.apply(TimePassed(11 + LOADING_US_MAX))
    assert members.loads == {}


def test_a_node_that_serves_does_not_load(members: Membership) -> None:
    """A second process of its name is not shown, until the first is lost."""
    epoch = join(members)
    members.apply(loading(incarnation=2))
    assert members.loads == {}

    members.apply(NodeEnded("spark0", epoch, "unplugged"))
    members.apply(loading(incarnation=2))
    assert set(members.loads) == {"spark0"}


def test_a_node_that_was_never_placed_is_not_remembered(members: Membership) -> None:
    """What is kept is bounded by the placement."""
    members.apply(loading("stranger"))
    assert members.loads == {}
