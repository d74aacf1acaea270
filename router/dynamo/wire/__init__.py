"""Dynamo's formats as values: discovery records, events, recovery answers, requests and answers. Pure.

Everything here comes from other processes. What cannot be read raises Malformed and nothing else.
"""
