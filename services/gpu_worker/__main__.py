"""Starts the worker process: `python -m services.gpu_worker`."""

from services.gpu_worker.service import main
from services.runtime.service import run_service
from services.wire.messages import Role

if __name__ == "__main__":
    run_service(Role.GPU_WORKER, main)
