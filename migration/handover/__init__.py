"""Coordinator side of the handover protocol. Pure: messages in, messages out.

`fleet.handover` holds the state tables shared with the ranks.
"""
