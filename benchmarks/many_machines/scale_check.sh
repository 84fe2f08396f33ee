#!/bin/sh
# `gangway scale-check` on a machine that has Python and no network, in less than 8 minutes.
#
#   benchmarks/many_machines/scale_check.sh pack DIR    here: wheels of Gangway and of what it needs, and this script, in a folder
#   DIR/scale_check.sh run [FLAG...]      there: install, check; check.html and check.json in the current folder
#
# PYTHON: which interpreter, of the same version on both sides (python3).
set -eu
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
extras='compile,client,report'

pack() {
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
    root=$(cd "$here/.." && pwd)
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$root"
    wheel=$(ls -t "$folder"/gangway_serve-*.whl | head -n 1)
    "$python" -m pip download --quiet --only-binary :all: --constraint "$root/constraints.txt" --dest "$folder" \
        "$wheel[$extras]" pip
    cp "$here/scale_check.sh" "$folder/"
    echo "$folder: $(ls "$folder" | grep -c '\.whl$') wheels, $(du -sh "$folder" | cut -f1)"
}

run() {
    home=$(mktemp -d)
    trap 'rm -rf "$home"' EXIT
    "$python" -m venv "$home/venv"
    wheel=$(ls -t "$here"/gangway_serve-*.whl | head -n 1)
    "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$here" "$wheel[$extras]"
    "$home/venv/bin/gangway" scale-check --seconds 300 --cache-dir "$home/cache" --html check.html --json check.json "$@"
}

case "${1:-}" in
    pack) pack "${2:?pack needs a folder}" ;;
    run) shift; run "$@" ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
