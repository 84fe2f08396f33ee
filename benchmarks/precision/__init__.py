"""bfloat16, halves and 8-bit numbers beside float32: times and answers."""
