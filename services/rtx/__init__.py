"""`k3-rtx`: the expert node of the rtx tier; the same daemon with its own paths and name."""

from __future__ import annotations

from typing import Final

from spark_daemon.command import node_command

main: Final = node_command("rtx", default_name="rtx")
