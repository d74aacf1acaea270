"""Experts that a request will activate, predicted from replicas of the tracker's tables. Pure."""
