"""What every room may use and what knows nothing of models: flags, console, files, logs, processes, host limits."""
