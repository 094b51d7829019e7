"""Running a program: executor, transport, stashes and the device."""
