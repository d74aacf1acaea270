"""Prediction of the experts that a request will activate, from replicas of the tracker's tables. Pure."""
