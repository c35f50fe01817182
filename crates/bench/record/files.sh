#!/usr/bin/env bash
# Predictions of `faultless advise` for mapped files, and measurements with a warm and with a cold page cache: `files.sh OUTPUT [ROUNDS]`
# writes one JSON line for each figure to OUTPUT, and prints the tables. It needs perf, gcc, and a working directory on a disk with 256 MiB.
# The read-ahead of the disk is tried at other sizes (--sysfs). FAULTLESS is the command.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-7} faultless=${FAULTLESS:-faultless}
dir=$(mktemp -d -p .)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat > files.c <<'END'
/* Maps a file, and loads one byte from each page in order (seq), from each page in random order (random), or from every 64th page in random
   order (sparse). */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
int main(int argc, char **argv) {
    int file = argc == 3 ? open(argv[1], O_RDONLY) : -1;
    struct stat about;
    if (file < 0 || fstat(file, &about)) return fprintf(stderr, "files FILE seq|random|sparse\n"), 1;
    long step = strcmp(argv[2], "sparse") ? 1 : 64, pages = about.st_size / 4096 / step;
    unsigned char *bytes = mmap(0, about.st_size, PROT_READ, MAP_SHARED, file, 0);
    long *order = malloc(pages * sizeof *order);
    for (long i = 0; i < pages; i++) order[i] = i;
    unsigned long seed = 1, sum = 0;
    if (strcmp(argv[2], "seq"))
        for (long i = pages - 1; i > 0; i--) {
            seed = seed * 6364136223846793005 + 1442695040888963407;
            long other = (seed >> 33) % (i + 1), page = order[i];
            order[i] = order[other], order[other] = page;
        }
    for (long i = 0; i < pages; i++) sum += bytes[order[i] * step * 4096];
    printf("%lu\n", sum);
}
END
gcc -O1 -o files files.c
head -c 256M /dev/urandom > data
sync data
: > "$output"
for order in seq random sparse; do
    for cache in warm cold; do
        echo "== $order, $cache"
        options=(--try --sysfs --rounds "$rounds" --json lines.jsonl)
        [ $cache = warm ] || options+=(--cold)
        "$faultless" advise "${options[@]}" -- ./files data $order 2>/dev/null || echo "files ended with $?"
        # The field `page_cache` distinguishes the lines.
        sed "s/\"params\":{/&\"page_cache\":\"$cache\",/" lines.jsonl >> "$output"
    done
done
