#!/usr/bin/env bash
# Finds or makes the one environment that everything runs in (.venv, Python 3.12) and installs
# Ridealong into it with what was tested together. Safe to run again: it does nothing when nothing
# changed. Called by the Makefile; needs no arguments and no earlier steps.
#
#   RIDEALONG_VENV    where the environment lies       (default: .venv; relative to the clone)
#   RIDEALONG_ENGINE  cpu or gpu                        (default: gpu where nvidia-smi finds one)
#   PYTHON            a Python 3.12 interpreter to use  (default: looked for)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${RIDEALONG_VENV:-.venv}

say() { printf '==> %s\n' "$*"; }

engine=${RIDEALONG_ENGINE:-}
if [ -z "$engine" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then engine=gpu; else engine=cpu; fi
fi

files=(setup.cfg pyproject.toml deploy/setup.sh "deploy/constraints-$engine.txt" "deploy/overrides-$engine.txt")
stamp="$engine $(cat "${files[@]}" | sha256sum | cut -d' ' -f1) $PWD"
if [ -x "$venv/bin/ridealong" ] && [ "$(cat "$venv/.ridealong" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

is_312() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12 \
    /usr/local/bin/python3.12 \
    "$(command -v uv >/dev/null 2>&1 && uv python find --no-project 3.12 2>/dev/null || true)"; do
    if [ -n "$candidate" ] && is_312 "$candidate"; then printf '%s' "$candidate"; return 0; fi
  done
  return 1
}

if ! { [ -x "$venv/bin/python" ] && is_312 "$venv/bin/python"; }; then
  if python=$(find_python); then
    say "making the environment $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  elif command -v uv >/dev/null 2>&1; then
    say "no Python 3.12 here: uv fetches one into $venv"
    uv venv --seed --python 3.12 "$venv"
  else
    echo "Ridealong needs Python 3.12 with venv, and found none. Install it (on Debian or Ubuntu:" \
      "apt-get install python3.12 python3.12-venv; or install uv), or name one: PYTHON=/path make demo" >&2
    exit 1
  fi
fi

say "installing Ridealong and its $engine engine into $venv (about 7 GB, minutes on a first run)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9' 2>&1 | grep -v '^WARNING' || true
# The environment's own pip may have been told about mirrors and certificates; uv asks the system's.
# Compiled now: where Python may not write bytecode, every start would compile torch and vLLM anew.
UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 VIRTUAL_ENV="$(cd "$venv" && pwd)" "$venv/bin/uv" pip install --quiet \
  --compile-bytecode \
  --constraint "deploy/constraints-$engine.txt" --override "deploy/overrides-$engine.txt" \
  --editable ".[learner,$engine,demo,test]"
printf '%s' "$stamp" > "$venv/.ridealong"
say "ready"
