"""gpu_worker: the ways a CPU can multiply by a model's matrices, and which one is taken for how many rows."""
