"""Programs on bare sockets around a measured router: its client and its engines, compiled so that they take a
small part of the machine, and the smallest router of all."""
