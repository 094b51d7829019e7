"""Says what is missing where only what planning needs is installed."""

from __future__ import annotations

from importlib.util import find_spec

from helixpipe.common.errors import UserError

TRAINING = {"torch": "torch", "megatron.core": "megatron-core"}
"""Modules that training needs beside those that planning does, and the packages that have them."""


def require_training(command: str) -> None:
    """Raise UserError, with the command that installs them, where packages that training needs are not there."""
    missing = [package for module, package in TRAINING.items() if not _is_there(module)]
    if missing:
        raise UserError(
            f"{command} needs {' and '.join(missing)}, which this environment does not have: install this checkout "
            f"with what training needs, pip install '.[train]'."
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
