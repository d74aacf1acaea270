"""The operator's API over the bus: drain, migrate, pause the loop, read placements and the state of the fleet.

Admission rule: usable from any Python program; free of the libraries of the command line (typer, rich, matplotlib).
"""
