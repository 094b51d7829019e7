"""Flags of `helixpipe playground`."""

from __future__ import annotations

from dataclasses import dataclass

from helixpipe.common.flags import option


@dataclass(frozen=True)
class PlaygroundOptions:
    """Where the playground is."""

    port: int = option(8000, "Port on this machine's loopback; 0: any that is free.", at_least=0, at_most=65535)
    output: str | None = option(
        None, "Write the static files into this folder, for any web server, and end.", metavar="FOLDER"
    )
    pyodide: str | None = option(
        None, "Pyodide's npm package as a file, where npm cannot fetch it.", metavar="FILE.tgz"
    )
