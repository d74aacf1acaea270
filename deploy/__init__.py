"""Composition root: the `roost` command builds and runs the processes of Roost. No other package imports this
one."""
