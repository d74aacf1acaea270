"""Clusters of requests by the experts they activate: learnt online, refitted from a reservoir. Pure."""
