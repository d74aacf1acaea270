"""The router as endpoint picker of a gateway: Envoy's external processing service, as the Gateway API
Inference Extension asks of it. A proxy sends headers and body of each request, forwards the request itself to
the endpoint that it is told, and reports the answer.

`server` alone imports gRPC, `messages` alone protobuf.
"""
