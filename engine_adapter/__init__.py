"""Sits beside an engine: says facts, obeys handovers. The only package that may import torch or nixl.

Admission rule: what touches an engine, ours or somebody else's. What facts mean for routing or placement is decided elsewhere.
"""
