"""From flags to costs, program and pipeline."""
