#!/usr/bin/env bash
# Does torchtitan's debug model train under one of our programs as under its own schedule? Its release is put, without what
# it depends on but does not need here, into runs/torchtitan; examples/torchtitan_llama.py trains with a file of ours and
# without, and both must print the same losses.
# Exit status 3: it cannot be installed here (Python before 3.11, nothing to download from); nothing was tested.
set -euo pipefail
cd -P "$(dirname "$0")/.."

folder=runs/torchtitan
packages=(
    torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser typeguard triton einops torchdata==0.11.0
    torch_checkpointing==0.1.1
)
make --no-print-directory install
mkdir -p "$folder"
if ! .venv/bin/python -m pip install --quiet --no-deps --upgrade --target "$folder/packages" "${packages[@]}"; then
    echo "torchtitan: it could not be installed, so nothing was tested with it" >&2
    exit 3
fi
export PYTHONPATH="$PWD/$folder/packages" OMP_NUM_THREADS=1
train=(.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/torchtitan_llama.py)
.venv/bin/helixpipe export zbv -p 2 -m 8 --to torch --output "$folder/zbv"
"${train[@]}" "$folder/zbv.compute_only.csv" >"$folder/ours.txt"
"${train[@]}" >"$folder/theirs.txt"
[ "$(grep -c '^step' "$folder/ours.txt")" = 3 ] && diff <(grep '^step' "$folder/ours.txt") <(grep '^step' "$folder/theirs.txt")
cat "$folder/ours.txt"
# GraphPP, its experiment with traced stages, over schedules of ours.
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/torchtitan_graph_pp.py zbv interleaved-1f1b zb-interleaved
