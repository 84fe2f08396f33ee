"""What is asked of a server: mixes of models, arrivals, and how well they were answered.

For real servers and simulated ones alike. Pure, but for reading and writing files.
"""
