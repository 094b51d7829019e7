"""The passes that turn a program into tasks over buffers, one file each; `build` runs them in this order."""
