"""Adapters: everything that touches a socket, a file mapping, the journal or systemd."""
