"""Compound tasks: models on the same input, cut into stages whose gangs run side by side."""
