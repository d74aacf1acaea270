"""Roost's own compact torch engine behind the Engine port: the default engine, and the reference for every
mechanism."""
