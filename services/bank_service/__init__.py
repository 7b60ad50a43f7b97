"""`k3-banks`: hands banks and single expert records to the nodes that ask for them.

A daemon of its own on the Station's host, so that the bytes of banks never touch the Station's
model thread or event loop. The messages are `shared.core.bank_wire`; the pulling end is the node's.
"""
