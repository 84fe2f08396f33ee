"""The supervisor's process: the repository of models, and the processes that serve them."""
