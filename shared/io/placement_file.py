"""Placement files: read whole, bounded and checked.

Owns the words about a file that cannot be read. Must not know which model or pod it should fit.
"""

from __future__ import annotations

from pathlib import Path

from shared.core import placement as placements
from shared.core.errors import PlacementError
from shared.core.placement import Placement
from shared.io.files import read_file


def read_placement(path: Path) -> Placement:
    """The placement in a file; PlacementError says what is wrong with it and the remedy."""
    try:
        data = read_file(path, bytes_max=placements.FILE_BYTES_MAX)
    except OSError as error:
        raise PlacementError(
            f"{path}: cannot read the placement: {error.strerror}: check the path, or make one "
            "with `k3 plan --out` or `k3 pod init`"
        ) from error
    return placements.decode(data, source=str(path))
