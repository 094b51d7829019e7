#!/usr/bin/env bash
# Installs Debian's or Ubuntu's SLURM (4 MB) for tests/slurm, which start one of their own: `make slurm`. Nothing that is
# installed is started. Where it is there already this does nothing.
# Exit status 3: it cannot be installed here (no root, no apt-get, nothing to download from).
set -euo pipefail

say() { echo "slurm: $*"; }

missing() {
    local command
    for command in slurmctld slurmd munged sbatch srun ip nsenter unshare; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || { echo "$command"; return; }
    done
}

[ -n "$(missing)" ] || { say "it is there"; exit 0; }
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "no $(missing), and this is not a Debian or Ubuntu system with the rights to install it: tests/slurm is left out"
    exit 3
fi
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d  # asked by packages whether their services may start
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
try() { timeout 300 apt-get -qq "$@" </dev/null >/dev/null 2>&1; }
try update || say "the lists of packages could not be brought up to date"
if ! try install --yes --no-install-recommends slurm-wlm munge iproute2 util-linux || [ -n "$(missing)" ]; then
    say "it could not be installed: tests/slurm is left out"
    exit 3
fi
say "installed"
