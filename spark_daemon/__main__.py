"""`k3-spark NAME`: an expert node of the spark tier."""

from __future__ import annotations

from typing import Final

from spark_daemon.command import node_command

spark: Final = node_command("spark")

if __name__ == "__main__":
    spark()
