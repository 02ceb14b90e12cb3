"""`prefrl launch` and `prefrl vllm-serve`: processes that start, run and end together."""
