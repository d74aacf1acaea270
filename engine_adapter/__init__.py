"""Adapt an inference engine to Roost: publish its events and execute its handovers. The only package that may
import torch or nixl.

Admission rule: code that touches an engine, Roost's own or a third party's. Other packages decide what the
events mean for routing and placement.
"""
