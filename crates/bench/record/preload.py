#!/usr/bin/env python3
"""Measures the operations of the preloaded library on real programs, in pairs of runs with and without the advice.

    preload.py OUTPUT [ROUNDS [NAME...]]

Writes one JSON line for each figure to OUTPUT, the machine's facts first, and prints the medians. Needs perf, node, gcc,
rustc and sort; missing programs are skipped. FAULTLESS is the command.
"""

import json
import os
import pathlib
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

FAULTLESS = shutil.which(os.environ.get("FAULTLESS", "faultless"))

TOUCH = r"""
#include <stdlib.h>
int main(int count, char **words) {
    size_t bytes = (size_t)1 << 30, work = atol(words[2]), pages = bytes / 4096;
    volatile char *block = malloc(bytes);
    volatile unsigned sink = 0;
    unsigned place = 1;
    int in_order = words[1][0] == 'o';
    for (size_t i = 0; i < (in_order ? pages : pages / 10); i++) {
        place = place * 1664525u + 1013904223u;
        block[(in_order ? i : place % pages) * 4096] = 1;
        for (size_t k = 0; k < work; k++) sink += k;
    }
    free((void *)block);
}
"""
NODE = r"""
const zlib = require('zlib'), crypto = require('crypto');
let total = 0;
for (let round = 0; round < 60; round++) {
    const rows = [];
    for (let i = 0; i < 2000; i++) rows.push({ id: i, name: 'row ' + i, tags: ['a', 'b', String(i * round)], at: new Date(i * 1e7) });
    const text = JSON.stringify(rows);
    const back = JSON.parse(text).filter(row => /7$/.test(row.name)).map(row => row.name.toUpperCase());
    total += zlib.deflateSync(text).length + back.sort().join().split(',').length;
    total += crypto.createHash('sha256').update(text).digest('hex').length + new Intl.NumberFormat('de').format(total).length;
}
console.log(total > 0);
"""


def functions(count):
    body = "".join(
        f"int f{i}(int a, int b) {{ int s = {i}; for (int k = 0; k < a; k++) {{ s += k * b % {i + 3}; if (s & {i % 7 + 1}) "
        f"s ^= b; else s = s * 31 + a; }} return s > {i} ? s - b : s + a; }}\n" for i in range(count))
    return body


def programs(folder):
    """Returns the name, the advice and the words of each program."""
    (folder / "touch.c").write_text(TOUCH)
    (folder / "work.js").write_text(NODE)
    (folder / "many.c").write_text(functions(1500))
    (folder / "short.c").write_text("int main(void) { return 0; }\n")
    body = "".join(
        f"pub fn f{i}(v: &mut Vec<u64>, m: &mut std::collections::HashMap<u64, String>) -> usize {{ v.sort(); "
        f"v.iter().filter(|x| **x % {i + 2} == 0).map(|x| format!(\"{{x}} {i}\")).for_each(|s| {{ "
        f"m.insert(s.len() as u64, s); }}); m.len() + v.len() }}\n" for i in range(250))
    (folder / "many.rs").write_text(body)
    (folder / "short.rs").write_text("pub fn f() {}\n")
    touch = str(folder / "touch")
    subprocess.run(["gcc", "-O1", "-o", touch, str(folder / "touch.c")], check=True)
    lines = random.Random(1)
    with open(folder / "lines", "w") as file:
        for _ in range(1_500_000):
            file.write(f"{lines.getrandbits(60):x} {lines.getrandbits(100):x}\n")
    cc1 = subprocess.run(["gcc", "-print-prog-name=cc1"], capture_output=True, text=True).stdout.strip()
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True).stdout.strip()
    rustc = f"{sysroot}/bin/rustc"
    crate = [rustc, "--crate-type", "rlib", "--out-dir", str(folder), "-Copt-level=2"]
    for advice in ["huge-text"]:
        yield "node, JSON, deflate and regular expressions", advice, ["node", str(folder / "work.js")]
        yield "node, an empty program", advice, ["node", "-e", "0"]
        yield "cc1, 1,500 functions", advice, [cc1, "-quiet", "-O2", str(folder / "many.c"), "-o", str(folder / "many.s")]
        yield "cc1, an empty function", advice, [cc1, "-quiet", str(folder / "short.c"), "-o", str(folder / "short.s")]
        yield "rustc, 250 functions", advice, [*crate, str(folder / "many.rs")]
        yield "rustc, an empty function", advice, [*crate, str(folder / "short.rs")]
    for advice in ["prefault-ahead", "populate=1M"]:
        yield "1 GiB touched in order", advice, [touch, "order", "0"]
        yield "1 GiB touched in order, 1 µs of work for each page", advice, [touch, "order", "1500"]
        yield "10 % of 1 GiB touched at random", advice, [touch, "random", "0"]
        yield "sort, 1.5 million lines", advice, ["sort", "--parallel=1", "-S", "400M", "-o", os.devnull, str(folder / "lines")]


def once(words, folder):
    """Runs a program. Returns its seconds of processor time, its elapsed seconds, faults, and resident MiB at the peak."""
    counts = folder / "counts"
    started = os.times()
    command = ["perf", "stat", "-x", ";", "-e", "page-faults", "-o", str(counts), "--", *words]
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
    _, status, usage = os.wait4(pid, 0)
    elapsed = os.times().elapsed - started.elapsed
    if status:
        raise SystemExit(f"{words} ended with status {status}")
    faults = next(line for line in counts.read_text().splitlines() if ";page-faults" in line).split(";")[0]
    return {"processor": usage.ru_utime + usage.ru_stime, "user": usage.ru_utime, "elapsed": elapsed, "faults": int(faults),
            "resident": usage.ru_maxrss / 1024}


def huge_text(words):
    """Returns the MiB of text on huge pages, the maximum during a run."""
    most = 0
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        within, kib = False, 0
        try:
            for line in open(f"/proc/{child.pid}/smaps"):
                first = line.split()[0]
                if "-" in first and not first.endswith(":"):
                    within = " r-xp " in line
                elif within and first in ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"):
                    kib += int(line.split()[1])
        except (OSError, IndexError):
            break
        most = max(most, kib)
    child.wait()
    return most / 1024


UNITS = {"processor": "s", "user": "s", "elapsed": "s", "faults": "1", "resident": "MiB", "huge text": "MiB"}


def main():
    output, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 9
    names = sys.argv[3:]
    with tempfile.TemporaryDirectory() as name, open(output, "w") as file:
        folder = pathlib.Path(name)

        def write(workload, setting, metric, value, pair):
            file.write(json.dumps({"machine": "host", "workload": workload, "setting": setting, "metric": metric,
                                   "unit": UNITS[metric], "params": {"pair": pair}, "knobs": {}, "cpus": os.cpu_count(),
                                   "value": value}) + "\n")
            file.flush()

        thp = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
        model = next(line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
        file.write(json.dumps({"kernel": platform.release(), "processor": model, "cpus": os.cpu_count(), "thp": thp,
                               "load": os.getloadavg()}) + "\n")
        for workload, advice, words in programs(folder):
            if names and not any(name in workload or name in advice for name in names) or not shutil.which(words[0]):
                continue
            with_advice = [FAULTLESS, "run", "--apply", advice, "--", *words]
            once(words, folder)
            runs = {"off": [], "on": []}
            for pair in range(rounds):
                for setting in random.sample(["off", "on"], 2):
                    run = once(with_advice if setting == "on" else words, folder)
                    runs[setting].append(run)
                    for metric, value in run.items():
                        write(workload, advice if setting == "on" else "off", metric, value, pair)
            medians = {metric: [statistics.median(run[metric] for run in runs[setting]) for setting in ("off", "on")]
                       for metric in runs["off"][0]}
            text = ""
            if advice == "huge-text":
                mib = huge_text(with_advice)
                write(workload, advice, "huge text", mib, 0)
                text = f"; {mib:.0f} MiB of huge text"
            ratio = {metric: statistics.median(on[metric] / max(off[metric], 1e-9) for off, on in zip(runs["off"], runs["on"]))
                     for metric in medians}
            print(f"{workload} | {advice}" + "".join(
                f" | {metric} {off:.2f} to {on:.2f} ({ratio[metric]:.3f})" for metric, (off, on) in medians.items()) + text,
                flush=True)


main()
