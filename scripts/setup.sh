#!/bin/sh
# Sets up .venv from the lock files: sh scripts/setup.sh run|dev|notebook. Called by make.
# Does nothing, fast, when .venv already holds what the locks say; PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

here="$(pwd -P)"
level="${1:?usage: sh scripts/setup.sh run|dev|notebook}"
case "$level" in
    run) locks="run" ;;
    dev) locks="run dev" ;;
    notebook) locks="run dev notebook" ;;
    *) echo "setup: unknown level '$level' (run, dev or notebook)" >&2; exit 2 ;;
esac
files=""
for lock in $locks; do files="$files requirements/$lock.lock"; done

# The stamp names everything that the content of .venv depends on, the folder included: venvs cannot move.
stamp=".venv/.stamp-$level"
want="$here $(cat $files pyproject.toml scripts/setup.sh | cksum)"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then exit 0; fi

usable() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# A venv that was moved, or whose Python is gone or too old, is made anew.
home_of_venv="$(.venv/bin/python -c 'import sys; sys.version_info >= (3, 11) and print(sys.prefix)' \
    2>/dev/null || true)"
if [ "$home_of_venv" != "$here/.venv" ]; then
    python="${PYTHON:-}"
    if [ -n "$python" ]; then
        usable "$python" || {
            echo "setup: PYTHON=$python is not Python 3.11 or newer with its venv module" >&2; exit 2; }
    else
        for candidate in python3.13 python3.12 python3.11 python3 python; do
            if usable "$candidate"; then python="$candidate"; break; fi
        done
        [ -n "$python" ] || {
            echo "setup: no Python 3.11 or newer with its venv module found on PATH." >&2
            echo "       Install one (Debian, Ubuntu: also the package python3-venv)," >&2
            echo "       or name it: make run PYTHON=/path/to/python3" >&2
            exit 2; }
    fi
    echo "setup: making .venv with $("$python" --version) ($(command -v "$python"))"
    rm -rf .venv
    "$python" -m venv .venv
fi
rm -f .venv/.stamp-*

echo "setup: installing from$files (1 to 3 minutes the first time, most of it torch)"
started=$(date +%s)
# pip is silent while it unpacks torch: say that we are still at it.
( while sleep 10 >/dev/null 2>&1; do echo "setup: ... $(($(date +%s) - started)) s, still installing"; done ) &
ticker=$!
trap 'kill $ticker 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
requirements=""
for file in $files; do requirements="$requirements -r $file"; done
.venv/bin/python -m pip install --disable-pip-version-check --no-input $requirements
.venv/bin/python -m pip install --disable-pip-version-check --no-input --quiet \
    --no-deps --no-build-isolation -e .
# Fails when pyproject.toml asks for what the locks do not hold.
.venv/bin/python -m pip check --disable-pip-version-check
# A higher level holds the lower ones.
for lock in $locks; do
    below="${below:-} requirements/$lock.lock"
    echo "$here $(cat $below pyproject.toml scripts/setup.sh | cksum)" > ".venv/.stamp-$lock"
done
echo "setup: .venv is ready after $(($(date +%s) - started)) s"
