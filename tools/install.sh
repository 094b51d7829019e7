#!/usr/bin/env bash
# Makes .venv and installs requirements.lock and this checkout into it. `make install` runs this, as do the other targets.
# Where the lock, pyproject.toml, setup.py and what is compiled are those of the last time it does nothing, and takes no time.
# PYTHON=python3.12 chooses the interpreter of a new .venv; an existing one keeps its own.
# MEGATRON_CORE=0.19.2 installs that release of megatron-core in place of the lock's (from 0.17 on: Python 3.12 or newer).
set -euo pipefail
cd -P "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv_python=.venv/bin/python
stamp=.venv/installed
core=${MEGATRON_CORE:-$(sed -n 's/^megatron-core==//p' requirements.lock)}
wanted="$(cksum requirements.lock pyproject.toml setup.py helixpipe/{compiled,fake_cuda}/*.{cpp,h}) megatron-core $core"

say() { echo "install: $*"; }
fail() {
    echo "install: $*" >&2
    exit 1
}

usable() {  # does the .venv run, and was it made here? (its scripts contain its path; `activate` is written last)
    "$venv_python" -c "import sys; sys.exit(sys.version_info < (3, 10))" && grep -qF "$PWD/.venv" .venv/bin/activate
} 2>/dev/null

if [ -e .venv ] && ! usable; then
    say ".venv is no use here (interrupted, moved, or its Python is gone or too old): making it again"
    rm -rf .venv
fi

if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

if [ ! -e .venv ]; then
    command -v "$python" >/dev/null ||
        fail "there is no $python; install Python 3.10 to 3.13 or name one: make PYTHON=/path/to/python3"
    "$python" -c "import sys; sys.exit(sys.version_info < (3, 10))" ||
        fail "$("$python" --version 2>&1) is too old; install Python 3.10 to 3.13 or name one: make PYTHON=/path/to/python3"
    "$python" -c "import ensurepip, venv" 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv"
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

pip() { "$venv_python" -m pip --disable-pip-version-check "$@"; }

torch=$(grep '^torch==' requirements.lock)
say "installing $torch (the largest download)"
pip install "$torch"
say "installing the other packages of requirements.lock, with megatron-core $core"
sed "s/^megatron-core==.*/megatron-core==$core/" requirements.lock >.venv/requirements.lock
pip install --requirement .venv/requirements.lock
say "installing this checkout (editable)"
PYTHONWARNINGS=ignore pip install --quiet --no-deps --no-build-isolation --editable .
sees_gpu="import sys, torch; sys.exit(not torch.cuda.is_available())"
if command -v nvidia-smi >/dev/null && ! "$venv_python" -c "$sees_gpu"; then
    say "NOTE: there is a GPU here that this build of torch cannot use: see docs/cluster.md"
fi
mkdir -p logs  # for the batch scripts: SLURM runs no job whose output it cannot write
echo "$wanted" >"$stamp"
say "done: $("$venv_python" --version) in .venv"
