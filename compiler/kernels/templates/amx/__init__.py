"""What kernels of bfloat16 and of 8-bit numbers share."""
