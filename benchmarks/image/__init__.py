"""The container images: a Docker daemon, a base where none can be pulled, the build."""
