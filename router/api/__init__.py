"""Faces of the router: HTTP routes, the bus, and a Python library.

Admission rule: what translates between a caller and `service`, and back.
"""
