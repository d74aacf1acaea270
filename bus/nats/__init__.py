"""The bus over NATS; the only folder that speaks nats-py, whose errors end here.

Core NATS carries telemetry and requests (`client`), JetStream what must last (`storage`); `link` is the connection under both.
Checked against nats-py 2.16 and nats-server 2.15.
"""

from bus.nats.client import NatsBus

__all__ = ["NatsBus"]
