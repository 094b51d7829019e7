"""Serves a folder on this machine alone."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError

ADDRESS = "127.0.0.1"


class _Handler(SimpleHTTPRequestHandler):
    """Static files, without a line for each request, and never from a browser's memory of an earlier version."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of the folder that has not started. port: 0 for any that is free. Raises UserError for a port
    that cannot be had."""
    try:
        return ThreadingHTTPServer((ADDRESS, port), partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise UserError(f"--port {port} cannot be had: {error.strerror}; 0 takes any that is free.") from None
