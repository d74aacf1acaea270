"""Connections to ranks and to servers that Roost does not run."""
