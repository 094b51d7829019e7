"""What every rank of `run_ranks` needs, imported once: the ranks are forked from a process that has imported this."""

from __future__ import annotations

from helixpipe.model.device import prepare

prepare()
