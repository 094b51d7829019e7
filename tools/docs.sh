#!/usr/bin/env bash
# Builds the site into build/site; every link is checked. mkdocs has an environment of its own, build/mkdocs, made once.
# MKDOCS=/path/to/mkdocs takes another one. The build itself needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdocs=${MKDOCS:-build/mkdocs/bin/mkdocs}
if [ ! -x "$mkdocs" ]; then
    .venv/bin/python -m venv build/mkdocs
    build/mkdocs/bin/pip --disable-pip-version-check install --quiet --requirement docs/requirements.txt
fi
rm -rf build/playground
if .venv/bin/python -m schedules.command playground --output build/playground; then
    .venv/bin/python -m tools.docs_site build/docs --playground
else
    rm -rf build/playground
    echo "docs: without the playground, which takes npm once"
    .venv/bin/python -m tools.docs_site build/docs
fi
"$mkdocs" build --quiet --strict --config-file build/mkdocs.yml
[ ! -d build/playground ] || mv build/playground build/site/playground
echo "docs: build/site/index.html"
