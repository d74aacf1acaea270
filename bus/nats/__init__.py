"""The bus over NATS. No other package uses nats-py, and its errors do not leave this package.

Core NATS carries telemetry and requests (`client`), JetStream durable data (`storage`). `link` is the
connection of both. Checked against nats-py 2.16 and nats-server 2.15.
"""

from bus.nats.client import NatsBus

__all__ = ["NatsBus"]
