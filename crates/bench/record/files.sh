#!/usr/bin/env bash
# Predictions of `faultless advise` for mapped files, and measurements with a warm and with a cold
# page cache: `files.sh OUTPUT [ROUNDS [CASE...]]` writes one JSON line for each figure to OUTPUT,
# with the figures of each run, and prints the tables. A CASE is an order of loads and a page cache,
# such as random-cold; without a CASE all run. The script needs perf, gcc, and a working directory
# on a disk with 256 MiB. As root, the read-ahead of the disk is tried at another size (--sysfs),
# and restored. FAULTLESS is the command. The exit status is 1 if a case failed.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-7} faultless=${FAULTLESS:-faultless}
cases=("${@:3}")
[ ${#cases[@]} -gt 0 ] || cases=({seq,random,sparse}-{cold,warm})
dir=$(mktemp -d -p .)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
cat > files.c <<'END_OF_C'
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
END_OF_C
gcc -O1 -o files files.c
head -c 256M /dev/urandom > data
sync data
: > "$output"
failed=0
for case in "${cases[@]}"; do
    order=${case%-*} cache=${case#*-}
    echo "== $order, $cache"
    options=(--try --rounds "$rounds" --json lines.jsonl)
    [ "$cache" = warm ] || options+=(--cold)
    [ "$(id -u)" != 0 ] || options+=(--sysfs)
    rm -f lines.jsonl
    "$faultless" advise "${options[@]}" -- ./files data "$order" 2>messages || { cat messages; failed=1; }
    # The fields `order` and `page_cache` distinguish the lines.
    [ ! -e lines.jsonl ] || sed "s/\"params\":{/&\"order\":\"$order\",\"page_cache\":\"$cache\",/" lines.jsonl >> "$output"
done
exit $failed
