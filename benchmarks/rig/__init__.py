"""What benchmark scripts stand on: the report, the load client, the mock engine. Nothing here is a benchmark."""
