#!/usr/bin/env bash
# Predictions of `faultless advise` for address space of jemalloc, metadata, commits and delays of
# mimalloc, forks and shared memory, and measurements: `causes.sh OUTPUT [ROUNDS [PART...]]` writes
# one JSON line for each figure to OUTPUT, and prints the tables. The parts are allocators, forks,
# python and memory; without a PART all run. The script needs perf, gcc, python3 with symbols, and
# the libraries of jemalloc and mimalloc (MIMALLOC_2_0, MIMALLOC_2_3 and MIMALLOC_3 name the files);
# programs without their library are omitted. FAULTLESS is the command. As root, the trial of shared
# memory changes shmem_enabled for its runs.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-7} faultless=${FAULTLESS:-faultless} python=${PYTHON:-python3}
parts=" ${*:3} "
part() { [ "$parts" = "  " ] || [[ $parts == *" $1 "* ]]; }
source=$(realpath "$(dirname "$0")")/churn.c
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cp "$source" .
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
cat > forks.c <<'END'
/* Forks twice with N MiB, in huge pages (1) or single pages (0), 9 times, and prints median processor times in microseconds: of a fork, of
   its child, which only ends, and of a store to each 2 MiB while the child lives; and of the second fork, after these stores. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
enum { FORK, CHILD, STORE, SECOND_FORK, SECOND_CHILD, ALL };
static const char *names[ALL] = {"fork_us", "child_us", "store_us", "second_fork_us", "second_child_us"};
static int less(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
int main(int argc, char **argv) {
    size_t n = (size_t)atoi(argv[1]) << 20, huge = 2 << 20; double all[ALL][9];
    for (int r = 0; r < 9; r++) {
        char *map = mmap(0, n + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *p = (char *)(((size_t)map + huge - 1) & -huge);
        madvise(map, n + huge, atoi(argv[2]) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        for (size_t i = 0; i < n; i += 4096) p[i] = 1;
        for (int second = 0; second < 2; second++) {
            int end[2]; char byte = 0; if (pipe(end)) return 1;
            double a = now(); int pid = fork();
            if (!pid) { if (read(end[0], &byte, 1) < 0) _exit(1); _exit(0); }
            double b = now();
            for (size_t i = 4096; i < n; i += huge) p[i] = 2;
            double c = now();
            struct rusage use; siginfo_t info;
            if (write(end[1], &byte, 1) < 0 || waitid(P_PID, pid, &info, WEXITED | WNOWAIT)) return 1;
            usleep(1000);
            wait4(pid, 0, 0, &use); close(end[0]); close(end[1]);
            all[second ? SECOND_FORK : FORK][r] = b - a;
            all[second ? SECOND_CHILD : CHILD][r] =
                (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1e6 + use.ru_utime.tv_usec + use.ru_stime.tv_usec;
            if (!second) all[STORE][r] = (c - b) / (n / huge);
        }
        munmap(map, n + huge);
    }
    for (int i = 0; i < ALL; i++) {
        qsort(all[i], 9, sizeof **all, less);
        printf("{\"workload\":\"causes:fork-%s\",\"setting\":\"%s\",\"metric\":\"%s\",\"unit\":\"us\",\"value\":%.2f}\n", argv[1],
               atoi(argv[2]) ? "huge" : "single", names[i], all[i][4]);
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
# A parent with many objects forks four workers: "collect" runs the collector in each, and "read"
# then reads all objects. "freeze" excludes the objects from the collections.
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
# Runs a command with and without its last word in turn, and writes the faults and the processor
# time that the word saves.
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
# Adds the lines of the last command to the output, each with the name of the case.
add() {
    "$python" -c 'import json, sys
for line in open("lines.jsonl"):
    one = json.loads(line)
    one["params"]["case"] = sys.argv[1]
    print(json.dumps(one))' "$1" >> "$output"
}
try() {
    case=$1
    shift
    echo "== $case: $*"
    "$faultless" advise --try --rounds "$rounds" --json lines.jsonl "$@" 2>/dev/null || echo "$case ended with $?"
    add "$case"
}
for program in churn blocks snapshot forks memfd; do gcc -O1 -o $program $program.c; done
build() { gcc -O1 -o "$2" "$1.c" -Wl,--no-as-needed "$3" 2>/dev/null || { echo "$2 is omitted: $3 is missing"; false; }; }
# jemalloc without `retain`, and its metadata.
if part allocators && build churn churn-je -l:libjemalloc.so.2; then
    MALLOC_CONF=retain:false try jemalloc-unretained -- ./churn-je 10 64 100
    build blocks blocks-je -l:libjemalloc.so.2 && try jemalloc-metadata -- ./blocks-je 512
fi
# mimalloc: a longer delay, and commits at once.
if part allocators && [ -e "${MIMALLOC_2_0:-}" ]; then MIMALLOC_DECOMMIT_DELAY=0 LD_PRELOAD=$MIMALLOC_2_0 try mimalloc-2.0-delay -- ./churn 10 64 20; fi
for library in "${MIMALLOC_2_3:-}" "${MIMALLOC_3:-}"; do
    if part allocators && [ -e "$library" ]; then
        MIMALLOC_EAGER_COMMIT=0 MIMALLOC_ARENA_EAGER_COMMIT=0 LD_PRELOAD=$library \
            try "commit-$(basename "$library")" -- ./churn 10 64 20
    fi
done
# Forks: huge pages of the parent.
if part forks; then
    for step in 512 64 8; do try snapshot-$step -- ./snapshot 256 20 $step; done
    for mib in 64 256; do
        for huge in 0 1; do ./forks $mib $huge | tee -a "$output"; done
    done
fi
# gc.freeze.
if part python; then
    for work in collect read; do
        echo "== workers.py $work"
        "$faultless" advise --stacks --json lines.jsonl -- "$python" workers.py $work 2>/dev/null
        add "workers-$work"
        "$python" pairs.py "$rounds" "workers-$work" "$python" workers.py $work freeze | tee -a "$output"
    done
fi
# Shared memory of a memfd in huge pages.
if part memory; then try memfd --sysfs -- ./memfd 256; fi
