#!/usr/bin/env bash
# Predictions of `faultless advise` for address space of jemalloc, metadata, commits and delays of mimalloc, forks and shared memory, and
# measurements: `causes.sh OUTPUT [ROUNDS]` writes one JSON line for each figure to OUTPUT, and prints the tables. It needs perf, gcc,
# python3 with symbols, and the libraries of jemalloc and mimalloc (MIMALLOC_2_0, MIMALLOC_2_3 and MIMALLOC_3 name the files); programs
# without their library are omitted. FAULTLESS is the command. As root, the trial of shared memory changes shmem_enabled for its runs.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-7} faultless=${FAULTLESS:-faultless} python=${PYTHON:-python3}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat > churn.c <<'END'
/* Rounds of work: a large batch of blocks is filled and freed, then time passes, and small blocks drive the allocator's clock. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int rounds = atoi(argv[1]), mib = atoi(argv[2]), pause = atoi(argv[3]);
    unsigned long sum = 0;
    int count = mib * 16;
    unsigned char **all = calloc(count, sizeof *all);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < count; i++) { all[i] = malloc(65536 - 64); memset(all[i], i | 1, 65536 - 64); }
        for (int i = 0; i < count; i++) { sum += all[i][1000]; free(all[i]); }
        usleep(pause * 1000);
        for (int i = 0; i < 20000; i++) { unsigned char *p = malloc(64); *p = i; sum += *p; free(p); }
    }
    printf("%lu\n", sum);
}
END
cat > blocks.c <<'END'
/* Allocates N MiB in blocks of 4 KiB, each with its own metadata in jemalloc, and stores to each. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    size_t count = (size_t)atoi(argv[1]) * 256;
    char **all = malloc(count * sizeof *all);
    for (size_t i = 0; i < count; i++) { all[i] = malloc(4096); all[i][0] = 1; }
    usleep(200000);
    printf("%d\n", all[count - 1][0]);
}
END
cat > snapshot.c <<'END'
/* Memory of N MiB with a request for huge pages; in each of R rounds a child shares it while the parent stores to every Sth page. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv) {
    size_t n = (size_t)atoi(argv[1]) << 20, step = 4096UL * atoi(argv[3]);
    char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(p, n, MADV_HUGEPAGE);
    for (size_t i = 0; i < n; i += 4096) p[i] = 1;
    for (int r = atoi(argv[2]); r > 0; r--) {
        int end[2]; char byte;
        if (pipe(end)) return 1;
        int pid = fork();
        if (!pid) { close(end[1]); if (read(end[0], &byte, 1) < 0) _exit(1); _exit(0); }
        for (size_t i = 0; i < n; i += step) p[i] = r;
        close(end[0]); close(end[1]); waitpid(pid, 0, 0);
    }
}
END
cat > memfd.c <<'END'
/* Maps a memfd of N MiB, shared, and stores to each page. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char **argv) {
    size_t n = (size_t)atoi(argv[1]) << 20;
    int fd = memfd_create("memory", 0);
    if (fd < 0 || ftruncate(fd, n)) return 1;
    char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    for (size_t i = 0; i < n; i += 4096) p[i] = 1;
}
END
cat > workers.py <<'END'
# A parent with many objects forks four workers: "collect" runs the collector in each, and "read" then reads all objects. "freeze"
# excludes the objects from the collections.
import gc, os, sys
data = [{"n": i, "s": str(i)} for i in range(150_000)]
if "freeze" in sys.argv:
    gc.collect(); gc.freeze()
pids = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        gc.collect()
        if "read" in sys.argv:
            sum(one["n"] for one in data)
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
END
cat > pairs.py <<'END'
# Runs a command with and without its last word in turn, and writes the faults and the processor time that the word saves.
import json, os, resource, statistics, subprocess, sys
rounds, name, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
def run(words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_minflt - before.ru_minflt, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
saved = []
for _ in range(rounds):
    without, with_word = run(command[:-1]), run(command)
    saved.append((without[0] - with_word[0], without[1] - with_word[1]))
faults, seconds = (sorted(column) for column in zip(*saved))
for metric, unit, value in [("measured_faults", "count", statistics.median(faults)), ("measured_seconds", "s", statistics.median(seconds)),
                            ("least_seconds", "s", seconds[0]), ("most_seconds", "s", seconds[-1])]:
    print(json.dumps({"workload": f"causes:{name}", "setting": command[-1], "params": {"rounds": rounds}, "metric": metric, "unit": unit, "value": value}))
END
: > "$output"
try() {
    echo "== $*"
    "$faultless" advise --try --rounds "$rounds" --json lines.jsonl "$@" 2>/dev/null || echo "${*: -1} ended with $?"
    cat lines.jsonl >> "$output"
}
for program in churn blocks snapshot memfd; do gcc -O1 -o $program $program.c; done
build() { gcc -O1 -o "$2" "$1.c" -Wl,--no-as-needed "$3" 2>/dev/null || { echo "$2 is omitted: $3 is missing"; false; }; }
# jemalloc without `retain`, and its metadata.
if build churn churn-je -l:libjemalloc.so.2; then
    MALLOC_CONF=retain:false try -- ./churn-je 10 64 100
    build blocks blocks-je -l:libjemalloc.so.2 && try -- ./blocks-je 512
fi
# mimalloc: a longer delay, and commits at once.
if [ -e "${MIMALLOC_2_0:-}" ]; then MIMALLOC_DECOMMIT_DELAY=0 LD_PRELOAD=$MIMALLOC_2_0 try -- ./churn 10 64 20; fi
for library in "${MIMALLOC_2_3:-}" "${MIMALLOC_3:-}"; do
    if [ -e "$library" ]; then
        MIMALLOC_EAGER_COMMIT=0 MIMALLOC_ARENA_EAGER_COMMIT=0 LD_PRELOAD=$library try -- ./churn 10 64 20
    fi
done
# Forks: huge pages of the parent, and gc.freeze.
try -- ./snapshot 256 20 512
try -- ./snapshot 256 20 64
for work in collect read; do
    echo "== workers.py $work"
    "$faultless" advise --stacks --json lines.jsonl -- "$python" workers.py $work 2>/dev/null
    cat lines.jsonl >> "$output"
    "$python" pairs.py "$rounds" "workers-$work" "$python" workers.py $work freeze | tee -a "$output"
done
# Shared memory of a memfd in huge pages.
try --sysfs -- ./memfd 256
