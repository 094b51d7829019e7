"""`--certify` of `simulate` and `plan`: the bound that every order of a step's work keeps, and its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helixpipe.common.files import try_file
from helixpipe.common.flags import option
from helixpipe.simulate.simulator import Simulation

if TYPE_CHECKING:
    from helixpipe.certify.certificate import Certificate

NO_FILE = "-"
"""The value of --certify without a file."""


@dataclass(frozen=True)
class CertifyOptions:
    """Whether a step is certified, and where its certificate goes."""

    certify: str | None = option(
        None,
        "Also print a lower bound that no order of this work on these ranks and in this memory can beat, and how far "
        "the schedule (of plan: the first) is from it; FILE: write there what tools/check_certificate.py can verify.",
        nargs="?",
        const=NO_FILE,
        metavar="FILE.json",
    )

    def try_file(self) -> None:
        """Raise UserError where the certificate's file cannot be written, before there is a certificate."""
        if self.certify not in (None, NO_FILE):
            try_file("--certify", self.certify)

    def certificate(self, simulation: Simulation, limit: float | None) -> Certificate:
        """Return the certificate of a step, written to the file if the flag names one. limit: see `certify`."""
        from helixpipe.certify.certificate import certify, save_certificate

        certificate = certify(simulation, limit)
        if self.certify not in (None, NO_FILE):
            save_certificate(certificate, self.certify)
        return certificate
