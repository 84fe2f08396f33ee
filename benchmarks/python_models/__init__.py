"""Python models beside Triton's: examples, pipelines, streams."""
