"""Metrics, trace spans and the log line of each request."""
