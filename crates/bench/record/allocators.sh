#!/usr/bin/env bash
# Predictions of `faultless advise` for allocators beside glibc's, and measurements: `allocators.sh OUTPUT [ROUNDS]` writes one JSON line
# for each figure to OUTPUT, and prints the tables. It needs perf, gcc, and the libraries of jemalloc, mimalloc 2.0 and gperftools
# (Debian: libjemalloc2, libmimalloc2.0, libtcmalloc-minimal4); programs without their library are omitted. FAULTLESS is the command.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-7} faultless=${FAULTLESS:-faultless}
source=$(realpath "$(dirname "$0")")/churn.c
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cp "$source" .
: > "$output"
try() {
    echo "== $*"
    "$faultless" advise --try --rounds "$rounds" --json lines.jsonl -- "$@" 2>/dev/null || echo "$1 ended with $?"
    cat lines.jsonl >> "$output"
}
build() { gcc -O1 -o "$1" churn.c -Wl,--no-as-needed "$2" 2>/dev/null || { echo "$1 is omitted: $2 is missing"; false; }; }
# Blocks of 64 KiB: 64 MiB are filled and freed in each of 10 rounds, with a pause between the rounds.
if build churn-je -l:libjemalloc.so.2; then try ./churn-je 10 64 100 && try ./churn-je 20 16 200; fi
if build churn-mi -l:libmimalloc.so.2.0; then
    try ./churn-mi 10 64 100
    MIMALLOC_DECOMMIT_DELAY=0 try ./churn-mi 10 64 20
fi
if build churn-tc -l:libtcmalloc_minimal.so.4; then TCMALLOC_AGGRESSIVE_DECOMMIT=1 try ./churn-tc 10 64 20; fi
