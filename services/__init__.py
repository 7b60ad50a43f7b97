"""Operator tools and tier daemons; the command line ties them together."""
