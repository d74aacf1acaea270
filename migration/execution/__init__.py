"""A plan carried out durably: one leader, a log in the blob store, one handover after the other.

Admission rule: what awaits acknowledgements of ranks or of the store. The decisions of the protocol are pure and live in `handover`.
"""
