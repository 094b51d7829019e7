#!/usr/bin/env bash
# Builds the source distribution and a wheel into dist/, and tries the wheel: `make dist`. pip's own build environment brings setuptools
# and pybind11. Where auditwheel is installed the wheel is made one for other Linux systems (manylinux); else it is for this one.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
rm -rf dist build/lib* build/wheel
"$python" -c "
import os
from setuptools import build_meta
os.makedirs('dist', exist_ok=True)
print('dist:', build_meta.build_sdist('dist'))"
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
if command -v auditwheel >/dev/null; then
    auditwheel repair --wheel-dir dist/manylinux dist/*.whl
fi
"$python" -m venv --system-site-packages build/wheel
build/wheel/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall dist/*.whl
(cd / && "$OLDPWD/build/wheel/bin/helixpipe" --version && "$OLDPWD/build/wheel/bin/helixpipe" simulate 1f1b -p 2 -m 2 >/dev/null)
ls -1 dist
