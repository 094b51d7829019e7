"""Errors a user sees, flags from dataclasses, files written whole or not at all."""
