#!/usr/bin/env bash
# Calls that change mappings on simulated CPUs, in the steady state: `vma.sh OUTPUT [CPUS
# [POLICIES]]` writes one JSON line for each figure to OUTPUT, with the facts of the machine in the
# first line, and prints the rate and the start-up of each run. CPUS are "1 2 8 64 384" by default,
# and POLICIES "speculative per_vma mmap_lock". A CPU does less work under a lock and on more CPUs,
# so that a run takes less than five minutes of one CPU. FAULTLESS is the command. All figures are
# simulated, on the profile 384-core.
set -euo pipefail
output=$(realpath -m "$1") counts=${2:-1 2 8 64 384} policies=${3:-speculative per_vma mmap_lock} faultless=${FAULTLESS:-faultless}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
[ -s "$output" ] || python3 - > "$output" <<'END'
import json, os, platform, time
model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), None)
print(json.dumps({"processor": model, "cores": os.cpu_count(), "kernel": "Linux " + platform.release(),
                  "profile": "384-core", "simulated": True, "unix_time": int(time.time())}))
END

# Chunks of a CPU in a round of the workload $3 in the order $4. The second of two rounds is
# measured.
chunks() {
    case $1-$2-$3-$4 in
        *-1-* | *-2-* | speculative-8-* | speculative-64-*) echo 256 ;;
        speculative-384-vma_unmap-private) echo 12 ;;
        speculative-384-vma_unmap-*) echo 4 ;;
        speculative-384-*-shuffled) echo 6 ;;
        speculative-384-*) echo 24 ;;
        *-8-*) echo 64 ;;
        *-64-*) echo 24 ;;
        *-vma_unmap-*) echo 4 ;;
        *) echo 6 ;;
    esac
}

# The last two arguments are the warm-up. If it leaves no time in which all CPUs work, because some
# CPUs end their work while others starve, the figures are those of the whole run: their lines have
# no `warm_up`.
run() {
    local begin=$SECONDS all=("$@" --profile 384-core --json "$lines")
    "$faultless" scale "${all[@]}" > /dev/null 2>&1 ||
        "$faultless" scale "${@:1:$#-2}" --profile 384-core --json "$lines" > /dev/null || { echo "failed: $*"; return; }
    # Without the counters of the subsystem, and with the hottest lines of `speculative` only.
    grep -v '"unit":"count"' "$lines" | grep -v 'locking=[pm].*"metric":"wait for' >> "$output"
    grep -E '"metric":"(operations|faults|line_transfers|line_fetches|interrupts|steady_calls|start_up_calls|start_up_calls_min)"' \
        "$lines" >> "$output"
    python3 - "$lines" "$((SECONDS - begin)) s" "$*" <<'END'
import json, sys
rows = {row["metric"]: row["value"] for row in map(json.loads, open(sys.argv[1]))}
start = rows.get("start_up_calls", f"> {rows['start_up_calls_min']}" if "start_up_calls_min" in rows else "unknown (whole run)")
print(f"{rows['operations_per_second']:14,.0f} a second, start-up {start} calls, {sys.argv[2]}: {sys.argv[3]}", flush=True)
END
}

for cpus in $counts; do
    for policy in $policies; do
        on=(--cpus "$cpus" --policies "$policy" --warm-up)
        for order in private shuffled; do
            for workload in vma_mmap vma_unmap_untouched vma_unmap vma_fault vma_mmap_touch; do
                each=$(chunks "$policy" "$cpus" $workload $order)
                # A chunk has four pages. Each is a fault.
                case $workload in
                    vma_fault) calls=$((4 * each)) ;;
                    vma_mmap_touch) calls=$((5 * each)) ;;
                    *) calls=$each ;;
                esac
                run "$workload" order=$order chunks="$each" passes=2 "${on[@]}" "$calls"
            done
        done
        each=$(chunks "$policy" "$cpus" mmap1 -)
        run mmap1 passes=$((2 * each)) "${on[@]}" $((2 * each))
        run brk1 seconds=0.02 "${on[@]}" 8
        # A piece has 16 pages: 17 calls and faults. The second half of the passes is measured.
        pieces=$((each < 8 ? 1 : each / 8))
        run discard size=$((64 * pieces))K passes=4 "${on[@]}" $((2 * 17 * pieces))
    done
done
