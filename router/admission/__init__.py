"""Admission control: waiting, its order, and retries. Pure; time is an argument."""
