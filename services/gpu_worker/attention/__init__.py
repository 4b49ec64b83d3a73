"""gpu_worker: attention over the paged pool: a plain reference, one for CPUs, one for CUDA devices."""
