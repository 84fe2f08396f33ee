"""Measurements of models and machines: profiles, tunings, reports. The server starts them as processes.

The commands find and compile a model as the server does, so they use its repository and its compile jobs.
"""
