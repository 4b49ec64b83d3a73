"""Starts the tokenizer process: `python -m services.tokenizer`."""

from services.runtime.service import run_service
from services.tokenizer.service import main
from services.wire.members import Role

if __name__ == "__main__":
    run_service(Role.TOKENIZER, main)
