#!/bin/sh
# Makes the recordings in this folder again. Needs root (or kernel.perf_event_paranoid=-1), perf,
# tracefs, valgrind and zstd, and the recorded programs: gcc, python3, sort, java and javac 17, redis-server, cargo.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cargo build --release --manifest-path "$here/../Cargo.toml" --example record
record=$(cargo metadata --format-version 1 --no-deps --manifest-path "$here/../Cargo.toml" |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/examples/record
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
on="perf 6.1, a virtual machine with two CPUs"

python3 - <<'PY'
import random
with open("many.c", "w") as out:
    out.write("#include <stdio.h>\n#include <string.h>\n")
    for i in range(1500):
        out.write(f"int f{i}(int a, int b) {{ int s = {i}; for (int k = 0; k < b; k++) "
                  f"{{ s += a * k ^ (s >> 3); if (s % {i % 7 + 2} == 0) s -= b; }} char t[32]; "
                  f"snprintf(t, sizeof t, \"%d\", s); return s + (int)strlen(t); }}\n")
random.seed(1)
with open("lines.txt", "w") as out:
    for i in range(600_000):
        out.write("%030x line %d of the file that is sorted\n" % (random.getrandbits(120), i))
PY
cat > work.py <<'PY'
import json
words = {}
for i in range(200_000):
    words.setdefault(f"word{i * 7919 % 50_000}", []).append(i)
text = json.dumps(words)
back = json.loads(text)
assert back == words
squares = [n * n for n in range(500_000)]
squares.sort(key=lambda n: n % 1009)
print(len(text), sum(squares) % 97)
PY
cat > Count.java <<'JAVA'
import java.util.*;
import java.util.stream.*;
public class Count {
    public static void main(String[] args) {
        Map<Integer, String> map = new HashMap<>();
        for (int i = 0; i < 300_000; i++) map.put(i * 31, "value" + i);
        long n = map.entrySet().parallelStream().filter(e -> e.getValue().endsWith("7")).count();
        System.out.println(n);
    }
}
JAVA
cat > server.sh <<'SH'
redis-server --save "" --appendonly no --port 7777 --bind 127.0.0.1 --io-threads 2 --dir . >/dev/null &
sleep 1
redis-benchmark -p 7777 -q -n 20000 -r 10000 -t set,get,lpush,hset -d 200 -c 20 >/dev/null
redis-cli -p 7777 bgsave >/dev/null
sleep 1
redis-cli -p 7777 shutdown nosave
wait
SH
cargo new --quiet --lib small
cat > small/src/lib.rs <<'RS'
//! A small library.
use std::collections::BTreeMap;
/// Counts words.
pub fn count(text: &str) -> BTreeMap<String, usize> {
    let mut map = BTreeMap::new();
    for word in text.split_whitespace() {
        *map.entry(word.to_owned()).or_default() += 1;
    }
    map
}
#[cfg(test)]
mod tests {
    #[test]
    fn counts() {
        assert_eq!(super::count("a b a")["a"], 2);
    }
}
RS

$record gcc.fltrace "gcc 12.2 -O2 -c many.c (1,500 functions); $on" -- gcc -O2 -c many.c -o many.o
$record python.fltrace "python 3.11 work.py (dictionaries, JSON, sorting); $on" -- \
    "$(python3 -c 'import sys; print(sys.executable)')" work.py
$record sort.fltrace "sort 9.1 --parallel=2 -S 64M lines.txt -o sorted.txt (600,000 lines, 42 MB); $on" -- \
    sort --parallel=2 -S 64M lines.txt -o sorted.txt
$record javac.fltrace "javac 17 Count.java; $on" -- javac Count.java
$record java.fltrace "java 17 -Xmx256m Count (a HashMap of 300,000 entries, a parallel stream); $on" -- \
    java -Xmx256m -cp . Count
$record redis.fltrace "sh server.sh: redis-server 7.0 --io-threads 2, redis-benchmark 7.0 -n 20000 -r 10000 \
-t set,get,lpush,hset -d 200 -c 20, bgsave; $on" -- sh server.sh
cd small
$record ../cargo.fltrace "cargo test -q --offline of a small library, rustc 1.95; $on" -- cargo test -q --offline
cd ..
# The same bodies, packed smaller.
for file in *.fltrace; do
    { head -c 24 "$file"; tail -c +25 "$file" | zstd -q -d | zstd -q -19; } > "$here/$file"
done

# The traces of addresses: all of a run, and a part of a long one.
pack() { zstd -22 --ultra --zstd=wlog=23 -q -f -o "$here/$1-addresses.lackey.zst"; }
valgrind --tool=lackey --trace-mem=yes --log-fd=9 ls / 9>&1 >/dev/null | pack ls
echo 'int f(int a) { return a * 3 + 1; }' > f.c
valgrind --tool=lackey --trace-mem=yes --log-fd=9 "$(gcc -print-prog-name=cc1)" -quiet -O2 f.c -o /dev/null 9>&1 >/dev/null |
    tail -n +69000001 | head -n 1000000 | pack cc1
