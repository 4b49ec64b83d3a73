"""Starts the scheduler process: `python -m services.scheduler`."""

from services.runtime.service import run_service
from services.scheduler.service import main
from services.wire.members import Role

if __name__ == "__main__":
    run_service(Role.SCHEDULER, main)
