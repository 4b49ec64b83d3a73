"""What needs a CUDA device to be known: does the worker compute there what it computes on a CPU, and how fast."""
