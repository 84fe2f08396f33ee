"""Ensembles: models that are other models, connected by their tensors."""
