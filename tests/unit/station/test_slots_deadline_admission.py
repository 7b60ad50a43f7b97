"""Small pure parts: ring slots, deadlines from hop curves, admission."""

from __future__ import annotations

import pytest

from shared.core.errors import LocalProtocolError, RequestError, RequestRefused
from station.admission import Admission, Limits, check_length
from station.deadline import WARM, DeadlinePolicy, HopCurve, budget_us
from station.slots import SlotTable


def test_a_slot_has_a_new_generation_each_time() -> None:
    """An old reply can never be taken for a new one."""
    table = SlotTable(2)
    first = table.acquire()
    assert first == (0, 1)
    table.release(0)

    assert table.acquire() == (0, 2)
    assert table.acquire() == (1, 1)
    assert table.acquire() is None


def test_an_abandoned_slot_rests_until_its_reply_was_seen() -> None:
    """A late writer must not hit a slot in its next life."""
    table = SlotTable(1)
    assert table.acquire() == (0, 1)
    table.abandon(0)

    assert table.acquire() is None
    assert table.is_all_abandoned
    table.release(0)
    assert not table.is_all_abandoned
    assert table.acquire() == (0, 2)


def test_a_free_slot_cannot_be_released() -> None:
    """Releasing twice would let two dispatches share a slot."""
    table = SlotTable(1)
    with pytest.raises(LocalProtocolError):
        table.release(0)


def _curve(hops: list[int]) -> HopCurve:
    curve = HopCurve()
    for hop in hops:
        curve.observe(hop)
    return curve


def test_the_budget_follows_the_slowest_node() -> None:
    """p99 x factor of the slowest, within floor and ceiling."""
    policy = DeadlinePolicy(factor=4.0, floor_us=1_000, ceiling_us=100_000)
    fast, slow = _curve([200] * 64), _curve([5_000] * 64)

    assert budget_us(policy, [fast]) == 1_000
    assert budget_us(policy, [fast, slow]) == 20_000
    assert budget_us(policy, [_curve([60_000] * 64)]) == 100_000
    assert budget_us(policy, []) == 1_000


def test_an_unknown_node_gets_the_ceiling() -> None:
    """A curve is believed only when it is warm."""
    policy = DeadlinePolicy()

    assert budget_us(policy, [_curve([10] * (WARM - 1))]) == policy.ceiling_us
    assert budget_us(policy, [_curve([10] * WARM)]) == policy.floor_us


def test_quantiles_slide_with_the_window() -> None:
    """Old hops leave the window, so a node can recover its name."""
    curve = _curve([9_000] * 512 + [100] * 512)

    assert (curve.p50_us, curve.p99_us) == (100, 100)


def test_admission_refuses_beyond_its_bounds() -> None:
    """Case A14: a full queue is an explicit refusal with a time to come back."""
    admission = Admission(Limits(active=1, waiting=1))
    admission.enter()
    admission.enter()

    with pytest.raises(RequestRefused) as refusal:
        admission.enter()

    assert refusal.value.retry_after_s > 0
    assert refusal.value.http_status == 503
    admission.leave()
    admission.enter()
    assert (admission.open, admission.refused) == (2, 1)


@pytest.mark.parametrize(
    ("prompt", "wanted", "param"), [(100, 1, "messages"), (90, 11, "max_tokens")]
)
def test_what_cannot_fit_is_refused_by_name(prompt: int, wanted: int, param: str) -> None:
    """The field to shorten is named."""
    with pytest.raises(RequestError) as error:
        check_length(prompt, wanted, 100)

    assert error.value.param == param
    assert error.value.error_code == "context_length_exceeded"
    check_length(90, 10, 100)
