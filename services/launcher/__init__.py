"""The launcher: starts the processes of a host, watches them, and ends them together.

It owns the children, the run directory and the port's reservation, and must never hold model code or request state.
"""
