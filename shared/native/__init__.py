"""C sources of `shared._native`, the expert kernel and the hot wait; `build.py` compiles them."""
