"""Attention: how it is found in a graph, and what operators of it are in simpler ones."""
