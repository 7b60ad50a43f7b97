"""`python -m services.bank_service`: the same as `k3-banks`."""

from __future__ import annotations

from services.bank_service.command import main

if __name__ == "__main__":
    main()
