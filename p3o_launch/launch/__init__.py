"""Launching: preflight, run directory, run record, generated script, and the commands that use them. Nothing heavy."""
