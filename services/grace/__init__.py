"""`k3-grace`: the expert node of the grace tier; the same daemon with its own paths and name."""

from __future__ import annotations

from typing import Final

from spark_daemon.command import node_command

main: Final = node_command("grace", default_name="grace")
