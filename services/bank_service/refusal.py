"""Why a question of a node is not answered: a value, not an error of this service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """`code` and `text` as the node gets them; after a permanent one a person has to act."""

    code: str
    text: str
    permanent: bool


def gone(source: str) -> Refusal:
    """Bytes that were found once and are not at hand any more."""
    return Refusal(
        "gone",
        f"nothing with the hash {source} is open here: ask for the bank or record again",
        permanent=False,
    )


def out_of_range(source: str, size: int) -> Refusal:
    """A range that ends behind the last byte."""
    return Refusal("out_of_range", f"{source} has only {size} bytes", permanent=True)
