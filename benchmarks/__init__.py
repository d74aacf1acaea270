"""Every number we claim, one command each; what the scripts stand on is in `rig`."""
