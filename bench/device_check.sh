#!/bin/sh
# Compares the worker on a CUDA device with itself on the CPU, and measures step times. Needs torch and a copy of this
# repository; packages that the machine lacks are taken from .device-packages, which one makes where there is a network:
#   pip install --target .device-packages --python-version 3.12 --only-binary=:all: --no-deps \
#       gguf msgpack prometheus-client pyzmq pyyaml rich pygments markdown-it-py mdurl tqdm
# Status: 0 right, 1 wrong, 3 no CUDA device.
set -eu
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # as the worker itself sets it
export PYTHONPATH="$PWD:$PWD/.device-packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m bench.device.check "$@"
