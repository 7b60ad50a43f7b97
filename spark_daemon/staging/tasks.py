"""Several jobs at once that end together, with one error instead of a group of them.

Must not know what the jobs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable


async def all_of(jobs: Iterable[Coroutine[object, object, None]]) -> None:
    """Run `jobs` to their ends; the first error ends the others and is raised alone."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
