"""Routing data: traces of the experts that tokens chose, recorded or made up."""
