"""gpu_worker: one model over several processes (tensor parallelism): who holds what, and how they compute together."""
