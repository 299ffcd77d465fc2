"""The Ray Serve side: deployments that own an engine each, and the HTTP API. Thin: the core does the work."""
