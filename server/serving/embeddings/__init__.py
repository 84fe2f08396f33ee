"""Embeddings and scores of texts, made of requests to a model."""
