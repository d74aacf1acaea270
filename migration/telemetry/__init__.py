"""Metrics and traces of the migration service. Only these modules import prometheus_client and
opentelemetry."""
