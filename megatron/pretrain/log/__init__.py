"""What a run reports: log lines, metrics, FLOPs, profiles, timelines."""
