"""One routing decision: filter ranks, price them, choose. Pure; time and chance come in as arguments.

Admission rule: what a decision is made of, and the values that explain it.
"""
