"""Which expert lives where: pods, byte ledger, policies, and what a placement would cost."""
