#!/usr/bin/env bash
# What `faultless advise` predicts for real programs, and what is measured: `advise.sh OUTPUT [ROUNDS [NAME...]]` writes one JSON line for
# each figure to OUTPUT, the machine's facts first, and prints the tables. It needs root (tracepoints, sizes of huge pages), python3,
# perl, node, a JDK, Go, sqlite3, gcc, rustc (whose allocator is jemalloc), sort and git, and half an hour; programs that are missing are left
# out. FAULTLESS is the command.
set -euo pipefail
output=$(realpath -m "$1") rounds=${2:-11}
shift $(($# > 2 ? 2 : $#))
faultless=${FAULTLESS:-faultless}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
cd "$dir"

cat > dict.py <<'END'
d = {}
for i in range(3000000):
    d[str(i)] = i
END
echo 'my %h; for my $i (1..800000) { $h{"key$i"} = "value$i"; }' > hash.pl
cat > map.js <<'END'
const m = new Map();
for (let i = 0; i < 1500000; i++) m.set('k' + i, { a: i, b: 'v' + i });
END
cat > Map.java <<'END'
public class Map {
    public static void main(String[] args) {
        var map = new java.util.HashMap<String, String>();
        for (int i = 0; i < 1500000; i++) map.put("k" + i, "v" + i);
    }
}
END
cat > map.go <<'END'
package main

import "strconv"

func main() {
	m := map[string]string{}
	for i := 0; i < 1500000; i++ {
		s := strconv.Itoa(i)
		m["k"+s] = "v" + s
	}
}
END
cat > bulk.sql <<'END'
CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 2000000)
    INSERT INTO t SELECT i, 'name' || (i*7919 % 2000000), hex(i*31) FROM n;
END
awk 'BEGIN { for (i = 0; i < 1500; i++)
    printf "int f%d(int*a,int n){int s=%d;for(int j=0;j<n;j++){s+=a[j]*%d;if(s>%d)s^=a[(j*%d)%%n];else s-=j;}return s;}\n", i, i, i+1, i*3, i%7+1 }' > big.c
awk 'BEGIN { srand(1); for (i = 0; i < 1500000; i++) printf "%010d%010d line %d\n", rand()*1e10, rand()*1e10, i }' > lines.txt
head -c 8000000 lines.txt > data
awk 'BEGIN { for (i = 0; i < 1500; i++)
    printf "pub fn f%d(a: &[i64]) -> i64 { a.iter().filter(|x| **x > %d).map(|x| x * %d).sum() }\n", i, i, i + 1 }' > many.rs

# As pyenv and rustup have programs of these names that start others.
python=$(python3 -c 'import sys; print(sys.executable)' || true)
rustc=$(rustc --print sysroot || true)/bin/rustc
if command -v javac >/dev/null; then javac Map.java; fi
if command -v go >/dev/null; then go build -o gomap map.go; fi

declare -A programs=(
    [python]="${python:-python3} dict.py"
    [perl]="perl hash.pl"
    [node]="node map.js"
    [java]="java -cp . Map"
    [go]="./gomap"
    [sqlite]="sqlite3 -init bulk.sql :memory: .quit"
    [gcc]="gcc -O0 -c big.c -o /dev/null"
    [rustc]="$rustc --crate-type rlib --emit metadata many.rs -o many.rmeta"
    [sort]="sort -S 400M --parallel=1 lines.txt -o /dev/null"
    [git]="git -C $repository fsck --full"
    [xz]="xz -3 -T1 -k -f data"
)
[ $# -gt 0 ] || set -- python perl node java go sqlite gcc rustc sort git xz

said() { printf '"%s":"%s"' "$1" "$2"; }
{
    printf '{%s,%s,%s,' "$(said kernel "$(uname -sr)")" "$(said processor "$(sed -n 's/^model name.*: //p;' /proc/cpuinfo | head -1)")" \
        "$(said load_before "$(cut -d' ' -f1 /proc/loadavg)")"
    printf '"cores":%s,"unix_time":%s,"rounds":%s,%s}\n' "$(nproc)" "$(date +%s)" "$rounds" \
        "$(said thp "$(sed 's/.*\[\(.*\)\].*/\1/' /sys/kernel/mm/transparent_hugepage/enabled)")"
} > "$output"
for name; do
    # Words of a command have no spaces.
    read -ra command <<< "${programs[$name]}"
    command -v "${command[0]}" >/dev/null || { echo "$name is omitted: ${command[0]} is missing"; continue; }
    echo "== $name: ${programs[$name]}"
    "$faultless" advise --try --sysfs --rounds "$rounds" --json lines.jsonl -- "${command[@]}" 2>/dev/null || echo "$name ended with $?"
    cat lines.jsonl >> "$output"
done
