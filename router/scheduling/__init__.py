"""One routing decision: filter ranks, price them, choose. Pure; time and randomness come in as arguments.

Admission rule: the parts of a decision, and the values that explain it.
"""
