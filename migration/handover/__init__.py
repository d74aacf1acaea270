"""The coordinator's side of the handover protocol. Pure: messages in, messages out; `fleet.handover` holds the tables that both sides share."""
