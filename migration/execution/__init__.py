"""Durable execution of plans: one leader, a log, plans in the blob store, one handover after another.

Admission rule: code that awaits acknowledgements from ranks or from the store. The decisions of the protocol
are pure and are in `handover`.
"""
