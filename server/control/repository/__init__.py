"""The model repository: which models are served, from their files to their unloading."""
