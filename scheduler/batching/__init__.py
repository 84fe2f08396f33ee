"""Which waiting requests are executed together, and on how many gangs. Pure; docs/batching.md explains it."""
