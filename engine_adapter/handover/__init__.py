"""One rank's side of the handover protocol. Pure: `agent` executes its decisions and reports the results."""
