"""HelixPipe: pipeline schedules as data, and the machinery that checks, simulates, draws and runs them."""

__version__ = "0.2.0"
