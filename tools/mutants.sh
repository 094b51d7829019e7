#!/usr/bin/env bash
# Do the tests notice broken code? mutmut changes one operator, number or argument of a folder at a time and runs the
# tests that reach it. The last line counts the mutants that a test killed; the survivors go to runs/mutants.txt.
#
#   make mutants FOLDER=helixpipe/lowering [TESTS="tests/lowering tests/runtime"]
#
# It works in a copy of the tree without the compiled core, so that the Python twins are what the tests run.
set -euo pipefail
cd -P "$(dirname "$0")/.."
: "${FOLDER:?say which, such as make mutants FOLDER=helixpipe/lowering}"

root=$PWD python=$PWD/.venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
"$python" -m pip install --quiet --disable-pip-version-check mutmut==3.8.1
git ls-files --cached --others --exclude-standard -z | tar --create --null --files-from - | tar --extract --directory "$copy"
cd "$copy"
"$python" - "$FOLDER" ${TESTS:-tests/${FOLDER##*/}} >>pyproject.toml <<'END'
import sys

_, source, *tests = sys.argv
copied = ["helixpipe", "schedules", "megatron", "tests", "tools", "benchmarks", "netlab", "docs", "examples"]
print(f"\n[tool.mutmut]\nsource_paths = {[source]}\npytest_add_cli_args_test_selection = {tests}\nalso_copy = {copied}")
END
"$python" -m mutmut run
"$python" -m mutmut export-cicd-stats >/dev/null
mkdir -p "$root/runs"
"$python" -m mutmut results >"$root/runs/mutants.txt"
"$python" - "$FOLDER" <<'END'
import json
import sys

with open("mutants/mutmut-cicd-stats.json") as file:
    counts = json.load(file)
reached = counts["total"] - counts["no_tests"]
killed = counts["killed"] + counts["timeout"] + counts["segfault"]
print(f"{sys.argv[1]}: {killed} of {reached} mutants killed ({100 * killed / max(reached, 1):.1f} %); ", end="")
print(f"no test reaches {counts['no_tests']} more; survivors are in runs/mutants.txt")
END
