"""The router between a Dynamo frontend and Dynamo's workers: an endpoint of Dynamo's runtime that takes
preprocessed requests, decides by Roost's cost, and streams the worker's answer back.

`wire` decodes what Dynamo writes and sends. `runtime` alone imports Dynamo, `zmq_events` alone ZeroMQ.
"""
