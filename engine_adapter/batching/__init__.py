"""Bookkeeping of one rank: its KV cache, batches, sampling, and the experts that its tokens were routed to.
Pure.

Admission rule: decisions about sequences and tokens that all of Roost's own engines share, with weights or
without.
"""
