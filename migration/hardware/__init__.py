"""Layouts before there is an engine: sizes, memory, switch times and crossings of a model on hardware that
is only considered."""
