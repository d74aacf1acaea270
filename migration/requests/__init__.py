"""Requests of operators over the bus: explain a plan, apply one, move experts, pause the loop."""
