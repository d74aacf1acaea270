"""Checks of a deployment: what is wrong, and how to mend it.

Admission rule: `judgements` decide on values and are pure; `probes` obtain these values, and change nothing
in the deployment.
"""
