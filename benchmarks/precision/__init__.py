"""bfloat16 and 8-bit numbers beside float32: times and answers."""
