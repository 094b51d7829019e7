"""What follows a run beside its training: speeds and plans anew, corrupt bits, snapshots in memory."""
