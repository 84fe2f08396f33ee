"""The compiled model on disk: the only thing that the compiler and the serving processes share. Never imports TVM."""
