"""Measurements: each prints its numbers with the machine, the commit and the command that made them."""
