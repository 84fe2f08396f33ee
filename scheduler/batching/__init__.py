"""Which requests are executed together, on how many gangs. Pure; docs/explanation/batching.md explains it."""
