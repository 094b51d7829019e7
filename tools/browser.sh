#!/usr/bin/env bash
# Installs a headless Chromium for the tests of the page that `helixpipe draw` writes and of the playground, from the system's
# packages, and fetches the playground's Pyodide with npm. Where they are there it does nothing. Where none can be had it says so and ends well: those tests are then skipped.
set -uo pipefail

say() { echo "browser: $*"; }

cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if command -v "$python" >/dev/null && command -v npm >/dev/null && "$python" -m helixpipe.playground.pyodide; then
    say "Pyodide is there"
else
    say "no Pyodide (it takes Python and npm): tests of the playground in a browser are skipped"
fi

for program in chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$program" >/dev/null; then
        say "$program is there"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "no Chromium, and this is not a Debian or Ubuntu system with the rights to install one: tests of the page are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
try() { timeout 300 apt-get -qq "$@" </dev/null >/dev/null 2>&1; }
install() { try install --yes --no-install-recommends "$1"; }
try update || say "the lists of packages could not be brought up to date"
if install chromium-headless-shell || install chromium; then
    say "installed"
else
    say "no Chromium could be installed: tests of the page are skipped"
fi
exit 0
