"""Logs and spans of a process: their destinations, and the OpenTelemetry SDK."""
