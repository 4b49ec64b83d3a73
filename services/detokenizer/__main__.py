"""Starts the detokenizer process: `python -m services.detokenizer`."""

from services.detokenizer.service import main
from services.runtime.service import run_service
from services.wire.members import Role

if __name__ == "__main__":
    run_service(Role.DETOKENIZER, main)
