"""`helixpipe profile`: measure a model's costs on this machine."""

from __future__ import annotations

import argparse
import json

from helixpipe.cli.measuring import measure
from helixpipe.cli.profile import efficiency_table, hardware_measured, profile_table
from helixpipe.cli.profile_options import ProfileOptions
from helixpipe.common.files import try_file
from helixpipe.common.flags import dataclass_from_namespace
from helixpipe.common.installed import require_training


def run(namespace: argparse.Namespace) -> None:
    require_training("profile")
    options = dataclass_from_namespace(ProfileOptions, namespace)
    try_file("--output", options.output)  # before minutes of measuring
    measured = measure(options)
    if namespace.json:
        print(json.dumps(measured.to_json()))
        return
    print(profile_table(measured))
    hardware = hardware_measured(options, measured)
    if hardware is not None:
        print(f"\n{efficiency_table(measured, hardware)}")
    print(f"\nwrote {options.output}; next: helixpipe simulate 1f1b -p 2 -m 8 --profile {options.output}")
