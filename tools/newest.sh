#!/usr/bin/env bash
# Is the newest megatron-core as good as the one that requirements.lock pins? In a copy of this checkout with an
# environment of its own (runs/newest) the tests run that touch megatron-core most, and five schedules train a small
# model here and there: their losses and gradient norms must be equal to the digit.
# NEWEST=0.19.2 chooses the release in place of the package index's newest, PYTHON3_12=/path/to/python its Python; before
# 3.12 no release after 0.16.1 installs. MEGATRON_LM=DIR: the megatron-core of NVIDIA's checkout in DIR is what is tested.
# With SCRIPTS=1 its own scripts run there instead (tests/megatron_lm), and results go into docs/megatron_lm.md.
# Exit status 3: it cannot be installed here (no such Python, nothing to download from); nothing was tested.
set -euo pipefail
cd -P "$(dirname "$0")/.."

copy=runs/newest
tests=(
    tests/test_architecture.py tests/model/test_device.py tests/model/test_equality.py tests/model/test_chunked_mlp.py
    tests/model/test_parts.py tests/checkpoint tests/drop_in/test_drop_in.py tests/data/test_tokenizer.py
    tests/drop_in/test_sequences.py tests/training/test_steps.py tests/integration/test_neighbours.py
    tests/integration/test_megatron_script.py
)

find_python() {
    local candidate
    for candidate in "${PYTHON3_12:-}" python3.12 python3.13 "$HOME"/.pyenv/versions/3.1[23]*/bin/python3; do
        if [ -n "$candidate" ] && "$candidate" -c "import sys, venv; sys.exit(sys.version_info < (3, 12))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "newest: no Python 3.12 or newer here; name one: PYTHON3_12=/path/to/python3.12 make test-newest" >&2
    return 1
}

python=$(find_python) || exit 3
listed() { "$python" -m pip --disable-pip-version-check index versions megatron-core 2>/dev/null || true; }
newest=${NEWEST:-$(listed | sed -n '1s/.*(\(.*\)).*/\1/p')}
if [ -z "$newest" ]; then
    echo "newest: the package index does not tell megatron-core's releases, so nothing was tested" >&2
    exit 3
fi
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name .venv ! -name helixpipe.egg-info -exec rm -rf {} +
git ls-files --cached --others --exclude-standard -z | tar --create --null --files-from - | tar --extract --directory "$copy"
git -C "$copy" init --quiet && git -C "$copy" add .  # a test asks git for the files
make --no-print-directory install
if ! PYTHON=$python MEGATRON_CORE=$newest make --no-print-directory --directory "$copy" install; then
    echo "newest: megatron-core $newest could not be installed, so nothing was tested with it" >&2
    exit 3
fi
if [ -n "${SCRIPTS:-}" ]; then
    results=$PWD/runs/megatron_lm.json
    MEGATRON_LM=$(cd -P "$MEGATRON_LM" && pwd)
    export MEGATRON_LM
    (cd "$copy" && MEGATRON_RESULTS=$results .venv/bin/python -m pytest -m megatron --durations=10 tests/megatron_lm)
    exec .venv/bin/python -m tests.megatron_lm.record "$results"
fi
if [ -n "${MEGATRON_LM:-}" ]; then  # only the core: the checkout has a package `tools`, too
    mkdir -p "$copy/core/megatron"
    ln -sfn "$(cd -P "$MEGATRON_LM" && pwd)/megatron/core" "$copy/core/megatron/core"
fi
in_copy() { (cd "$copy" && PYTHONPATH=$PWD/core .venv/bin/python "$@"); }
in_copy -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "${tests[@]}"
.venv/bin/python tools/losses.py --output runs/losses.json
in_copy tools/losses.py --equal "$PWD/runs/losses.json"
