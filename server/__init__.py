"""Front ends over one data plane, the model repository, supervision and the command line."""
