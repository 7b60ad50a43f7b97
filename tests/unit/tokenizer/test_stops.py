"""Stop strings: the exact cut, however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from station.tokenizer.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All text that came out, and the stop that matched."""
    matcher = StopMatcher(stops)
    text = "".join([matcher.feed(piece) for piece in pieces])
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["beta gamma"], ["alpha be", "ta ga", "mma delta"], "alpha "),
        (["beta gamma"], ["alpha be", "ta ga", "m"], "alpha beta gam"),
        (["\n"], ["line", "\n"], "line"),
        (["abcd", "bc"], ["xabcd"], "xa"),
        (["bcd", "abcd"], ["xabcde"], "x"),
        (["b"], ["abc"], "a"),
        (["aab"], ["aaab"], "a"),
        ([], ["any", "thing"], "anything"),
    ],
)
def test_a4_cut_is_exact(stops: list[str], pieces: list[str], expected: str) -> None:
    """A4: over token borders, as the last token, overlapping, inside one token, and no match."""
    assert expected == run(stops, pieces)[0]


def test_a4_nothing_comes_after_a_match() -> None:
    """A4: the matcher is silent once it matched."""
    matcher = StopMatcher(["x"])

    assert (matcher.feed("axb"), matcher.feed("cd"), matcher.finish()) == ("a", "", "")


def test_text_that_cannot_stop_is_not_held() -> None:
    """Only the part that may still become a stop string waits."""
    matcher = StopMatcher(["beta"])

    assert matcher.feed("alpha be") == "alpha "
    assert matcher.feed("at") == "beat"


def oracle(stops: list[str], text: str) -> str:
    """Grow the text one character at a time and look for a stop at its end; the longest wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


TEXTS = st.text(alphabet="ab\n", max_size=30)


@settings(deadline=None)
@given(
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(TEXTS, max_size=8),
)
def test_a4_streaming_equals_the_whole(stops: list[str], pieces: list[str]) -> None:
    """A4: any cutting into pieces gives what the whole text gives."""
    text = "".join(pieces)

    assert oracle(stops, text) == run(stops, pieces)[0] == run(stops, [text])[0]
