"""`helixpipe compare`: schedules side by side, all of the catalogue unless some are named."""

from __future__ import annotations

import argparse

from helixpipe.cli.side_by_side import compare
from helixpipe.planning.catalogue import Catalogue
from helixpipe.program.files import is_file


def run(namespace: argparse.Namespace) -> None:
    catalogue: Catalogue = namespace.catalogue
    if namespace.schedules:
        compare({name: None if is_file(name) else catalogue.find(name) for name in namespace.schedules}, namespace)
    else:
        compare({name: each for name, each in catalogue.items() if each.one_rank == (namespace.ranks == 1)}, namespace)
