"""Shared parts of benchmark scripts: the report, the load client, the mock engine. Contains no benchmark."""
