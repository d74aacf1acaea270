"""Metrics, spans and the log line of each request."""
