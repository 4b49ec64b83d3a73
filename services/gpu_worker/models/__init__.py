"""gpu_worker: model families as plain functions of their inputs."""
