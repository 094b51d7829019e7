"""Costs, program and pipeline from the flags."""
