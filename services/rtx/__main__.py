"""Lets `python -m services.rtx` start `k3-rtx`."""

from __future__ import annotations

from services.rtx import main

if __name__ == "__main__":
    main()
