"""The books of one rank: its KV cache, its batches, its sampling, the experts its tokens were routed to. Pure.

Admission rule: what decides about sequences and tokens in every engine of ours, with weights or without.
"""
