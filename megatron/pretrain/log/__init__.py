"""Reports of a run: log lines, metrics, FLOPs, profiles, timelines."""
