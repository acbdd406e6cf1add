#!/usr/bin/env bash
# Find or install uv and a Python 3.12, then install this project with the `cpu` extra into .venv. Sourced by the others.
set -euo pipefail

project_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

find_uv() {
    if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then
        UV=(uv)
    elif python3 -m uv --version >/dev/null 2>&1; then
        UV=(python3 -m uv)
    else
        echo "== installing uv with pip"
        python3 -m pip install --quiet uv || python3 -m pip install --quiet --user --break-system-packages uv
        UV=(python3 -m uv)
    fi
}

find_python() {
    [ -n "${UV_PYTHON:-}" ] && return
    local candidate
    for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12 python3; do
        candidate="$(command -v "$candidate" 2>/dev/null)" || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            UV_PYTHON="$candidate"
            export UV_PYTHON
            return
        fi
    done
    echo "== no Python 3.12 on this machine: uv will fetch one"
}

install_project() {
    find_uv
    find_python
    echo "== installing the project with the cpu extra (about 7 GB the first time)"
    (cd "$project_root" && "${UV[@]}" sync --quiet --extra cpu "$@")
    PYTHON="$project_root/.venv/bin/python"
    # Each process of a run imports some 5,000 modules: without their bytecode on disk that takes 12 s longer.
    unset PYTHONDONTWRITEBYTECODE
}
