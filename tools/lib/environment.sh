# Sourced by the programs beside it: sets $root and $python, an interpreter of the repository's .venv with the project installed.
#
# The stamp in .venv holds a hash of everything the installation follows from and is written last, so an installation that was
# interrupted is never taken for a finished one; a lock keeps two programs from installing at once.

program=tools/$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
stamp=$venv/.commplan-stamp
mark=$venv/.commplan-made-this
log=$venv/.commplan-install.log

say() { printf '%s: %s\n' "$program" "$*" >&2; }
die() { say "$*"; exit 2; }

fingerprint() { { printf '%s\n' "$root"; cat "$root/pyproject.toml" "$root/tools/constraints.txt"; } | sha256sum; }

is_ready() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && works; }

# False where the Python that made .venv is gone or has become another version.
works() { "$python" -c 'from importlib.util import find_spec; import sys; sys.exit(find_spec("torch") is None)' 2>/dev/null; }

# Prints the first Python on PATH that is new enough and can make a virtual environment; says what is missing if there is none.
find_base_python() {
    local candidate lacking=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        lacking=${lacking:-$("$candidate" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')}
    done
    [ -z "$lacking" ] || die "this Python cannot make a virtual environment; install the Debian package $lacking"
    die "no Python 3.11 or newer found; install the Debian packages python3 and python3-venv"
}

install_project() {
    local base
    if [ -e "$venv/pyvenv.cfg" ] && [ ! -e "$mark" ]; then
        die "$venv exists and was not made by this program; move it away and start again"
    fi
    base=$(find_base_python)
    if [ ! -f "$stamp" ] || ! works; then
        # An earlier installation may have stopped anywhere in the middle.
        rm -f "$venv/pyvenv.cfg"
        rm -rf "$venv"
    fi
    rm -f "$stamp"
    mkdir -p "$venv"
    : >"$mark"
    say "installing into $venv; downloads about 330 MB with the CPU build of torch, 2.8 GB with the CUDA build ..."
    {
        "$base" -m venv "$venv" &&
            "$python" -m pip install --quiet --disable-pip-version-check --no-input --progress-bar off \
                --constraint "$root/tools/constraints.txt" --editable "$root[dev]"
    } >"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "installation failed; the whole log is $log"
    }
    fingerprint >"$stamp"
}

if ! is_ready; then
    command -v flock >/dev/null || die "flock is missing; install the Debian package util-linux"
    { exec 9>"$root/.venv.lock"; } 2>/dev/null || die "cannot write in $root"
    flock --nonblock 9 || { say "waiting for another installation to finish ..."; flock 9; }
    if ! is_ready; then install_project; fi
    exec 9>&-
fi
