"""What a request goes through whatever its protocol is: models, ensembles, sequences, Python models."""
