"""The `helixpipe` command."""
