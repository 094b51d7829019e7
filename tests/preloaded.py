"""Imports once what every rank of `run_ranks` needs: the ranks are forked from a process that has imported this."""

from __future__ import annotations

import gc

from helixpipe.model.device import prepare

prepare()
gc.freeze()  # collections in the ranks need not search it, nor copy its memory by that
