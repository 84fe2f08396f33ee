"""What a model is configured to be, as both sides of the wall read it."""
