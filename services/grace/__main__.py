"""Lets `python -m services.grace` start `k3-grace`."""

from __future__ import annotations

from services.grace import main

if __name__ == "__main__":
    main()
