"""Log lines and spans of a process: where they go, and the OpenTelemetry SDK behind them."""
