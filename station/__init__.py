"""The coordinator: model, lanes, split, ledger, combine, membership, chat endpoint."""
