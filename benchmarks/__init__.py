"""One command for every published number; shared parts are in `rig`."""
