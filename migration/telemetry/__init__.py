"""Metrics and spans of the migration service. The only modules of this part that know prometheus_client and opentelemetry."""
