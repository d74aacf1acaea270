"""Placement algorithms: arrays in, arrays out. Pure numpy; no engine, no message, no clock.

Admission rule: an algorithm that could be published with its complexity. The calls and their order are in
`planning`. docs/solvers.md says for every algorithm when it runs, its complexity, its bound and its published
source.
"""
