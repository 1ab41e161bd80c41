"""Planning before the first step: buffers, hazards, memory and kernels of a rank's program."""
