"""One rank's side of the handover protocol. Pure: `agent` carries out what is decided here and reports back."""
