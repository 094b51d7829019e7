"""Flags of pretrain_gpt.py that name a model, beside --load. No torch here."""

from __future__ import annotations

CHECKPOINT_FLAGS = (
    "--use-checkpoint-args",
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "0", "--mock-data"),
    *("--no-load-optim", "--no-load-rng"),
)
"""What its command line asks for that means nothing here, and what is not loaded."""
