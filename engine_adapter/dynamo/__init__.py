"""Our engines as workers of a Dynamo deployment: requests and answers on its request plane, KV events and
load on its event plane, and the model card in its discovery.

Only `connection` imports Dynamo's runtime; everything else works on values.
"""
