"""A range of numbers on the command line that NaN is not in."""

from __future__ import annotations

import math

import click


class RealRange(click.FloatRange):
    """`click.FloatRange` lets NaN through: it is neither below nor above any bound."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; a usage error when it is NaN or outside."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number
