"""Numbers on the command line: what is not a number is a usage error."""

from __future__ import annotations

import pytest

from services import cli


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--restart-delay-s", "nan"],
        ["up", "--restart-delay-s", "-0.1"],
        ["chat", "--temperature", "NaN"],
        ["chat", "--temperature", "2.1"],
    ],
)
def test_a_number_outside_its_range_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN is in no range, though it compares with neither bound."""
    assert cli.run(arguments) == 2
    assert f"Invalid value for '{arguments[1]}'" in capsys.readouterr().err
