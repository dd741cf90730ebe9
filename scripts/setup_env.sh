# Sourced by quickstart, test and lock: find a Python, make .venv, install into it. Works from any directory.
# shellcheck shell=bash

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${JAXSERVE_VENV:-$REPOSITORY/.venv}"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# is_python COMMAND MINOR_LOW MINOR_HIGH: does it run, is it a CPython 3.LOW .. 3.HIGH, and can it make a venv?
# (A pyenv shim exists for versions that aren't active, and Debian ships python3 without ensurepip.)
is_python() {
    "$1" - "$2" "$3" >/dev/null 2>&1 <<'PYTHON'
import sys
low, high = int(sys.argv[1]), int(sys.argv[2])
import ensurepip, venv
ok = sys.implementation.name == "cpython" and sys.version_info[0] == 3 and low <= sys.version_info[1] <= high
sys.exit(0 if ok else 1)
PYTHON
}

# python_candidates: commands worth trying, one a line.
python_candidates() {
    local minor root
    [ -z "${PYTHON:-}" ] || printf '%s\n' "$PYTHON"
    for minor in 12 13 14; do
        printf 'python3.%s\n' "$minor"
        for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
            [ -z "$root" ] || printf '%s\n' "$root/versions/3.$minor".*/bin/python
        done
        for root in /opt/homebrew/bin /usr/local/bin /usr/bin; do
            printf '%s/python3.%s\n' "$root" "$minor"
        done
        if command -v uv >/dev/null 2>&1; then
            uv python find --no-project "3.$minor" 2>/dev/null || true
        fi
    done
    printf '%s\n' python3 python
}

# find_python: prints the Python to use; the version named in .python-version wins over newer ones.
find_python() {
    local wanted low high candidate
    wanted="$(sed -n 's/^3\.\([0-9][0-9]*\).*/\1/p' "$REPOSITORY/.python-version")"
    if [ -n "${PYTHON:-}" ]; then
        is_python "$PYTHON" 12 99 || die "PYTHON=$PYTHON isn't a Python >= 3.12 that can make a virtual environment"
        printf '%s\n' "$PYTHON"
        return
    fi
    while read -r low high; do
        while IFS= read -r candidate; do
            if is_python "$candidate" "$low" "$high"; then
                printf '%s\n' "$candidate"
                return
            fi
        done < <(python_candidates)
    done <<RANGES
$wanted $wanted
12 14
12 99
RANGES
    die "no Python >= 3.12 with venv found: get one with 'uv python install 3.12', 'pyenv install 3.12'," \
        "'brew install python@3.12' or 'apt install python3.12-venv', or set PYTHON=/path/to/python"
}

# fingerprint: changes when what has to be installed changes.
fingerprint() {
    "$VENV/bin/python" - "$REPOSITORY/pyproject.toml" "$REPOSITORY/constraints.txt" <<'PYTHON'
import hashlib, sys
digest = hashlib.sha256((sys.version + sys.argv[1]).encode())  # the path too: an editable install names it
for path in sys.argv[1:]:
    digest.update(open(path, "rb").read())
print(digest.hexdigest())
PYTHON
}

# prepare_venv EXTRAS: .venv with the package (editable) and those extras, e.g. "test" or "test,cuda12" or "".
# Skips what an earlier run has done.
prepare_venv() {
    local extras="$1" python stamp now
    if ! is_python "$VENV/bin/python" 12 99; then
        [ ! -e "$VENV" ] || [ -f "$VENV/pyvenv.cfg" ] || die "$VENV exists and is no virtual environment"
        python="$(find_python)" || exit 1
        say "making $VENV with $("$python" -c 'import sys; print("Python", sys.version.split()[0])')"
        rm -rf "$VENV"
        "$python" -m venv "$VENV"
    fi
    stamp="$VENV/.jaxserve-installed-${extras:-base}"
    now="$(fingerprint)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
        return
    fi
    say "installing jaxserve${extras:+ with $extras} (a few minutes the first time) ..."
    rm -f "$stamp"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
        --constraint "$REPOSITORY/constraints.txt" --editable "$REPOSITORY${extras:+[$extras]}"
    printf '%s\n' "$now" >"$stamp"
}

# prepare_browser: a Chromium for the tests of the page. In CI one is installed where there is none; a developer decides
# for himself. Without one these tests fail in CI, and are skipped elsewhere.
prepare_browser() {
    local command
    [ -z "${JAXSERVE_CHROMIUM:-}" ] || return 0
    for command in chromium chromium-browser google-chrome google-chrome-stable; do
        ! command -v "$command" >/dev/null 2>&1 || return 0
    done
    if [ -z "${CI:-}" ]; then
        say "no Chromium: the tests of the page will be skipped ('apt-get install chromium', or" \
            "'$VENV/bin/playwright install chromium')"
        return 0
    fi
    say "installing Chromium for the tests of the page ..."
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        apt-get update -qq >&2 || say "apt-get update failed; trying with what it knows"
        if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2; then
            return 0
        fi
    fi
    "$VENV/bin/python" -m playwright install chromium >&2 ||
        say "warning: no Chromium could be installed, so the tests of the page will fail"
}
