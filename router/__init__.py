"""Hears all, decides, forwards, explains. The decision is a synchronous pure call; everything awaited happens around it."""
