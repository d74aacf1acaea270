"""Interfaces of the router: HTTP routes, the bus, and a Python library.

Admission rule: code that translates between a caller and `service`, in both directions.
"""
