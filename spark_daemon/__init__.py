"""The expert node: bank to arena to executor to ring server; used by every remote tier."""
