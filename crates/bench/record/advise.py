#!/usr/bin/env python3
"""Compares predictions of `faultless advise` with measurements, for real programs and for servers under load.

    advise.py OUTPUT [ROUNDS [NAME...]]     measures
    advise.py --table RECORD... [--predictions RECORD]
                                            prints the tables of earlier records, the second with the predictions of
                                            another version of the command
    advise.py --repeat RECORD RECORD        prints how much the savings of the same advice differ between two records,
                                            and from the predictions of the second

Writes one JSON line for each figure to OUTPUT, the machine's facts first and the versions of the programs second, and
prints the tables. It needs root (tracepoints, sizes of huge pages), and an hour on a host without other load; programs
that are missing are skipped. FAULTLESS is the command.
"""

import json
import os
import pathlib
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

# The fewest pairs of runs for each advice, and the seconds that all runs without the advice take:
# the noise of a short run is a larger part of its time, so it needs more pairs, up to four times
# ROUNDS.
ROUNDS = 9
SECONDS = 8

# The compilers of programs that print no version.
COMPILED = {"go": "go", "ocaml": "ocamlopt"}

# A server's script starts the server, sends it a fixed number of requests, and stops it.
SERVE = """#!/bin/sh
cd "$(dirname "$0")"
%(server)s > server.log 2>&1 &
until %(ready)s > /dev/null 2>&1; do kill -0 $! || exit 1; sleep 0.1; done
%(load)s > load.log 2>&1
%(stop)s
wait
"""
STOP = "kill $!"
AB = "ab -q -c 4 -n %d http://127.0.0.1:%d/"
OPEN = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", %d))'"

FILES = {
    "dict.py": "d = {}\nfor i in range(2000000):\n    d[str(i)] = i\n",
    "hash.pl": 'my %h; for my $i (1..800000) { $h{"key$i"} = "value$i"; }\n',
    "map.js": "const m = new Map();\nfor (let i = 0; i < 1500000; i++) m.set('k' + i, { a: i, b: 'v' + i });\n",
    "Map.java": """public class Map {
    public static void main(String[] args) {
        var map = new java.util.HashMap<String, String>();
        for (int i = 0; i < 1500000; i++) map.put("k" + i, "v" + i);
    }
}
""",
    "map.go": """package main

import "strconv"

func main() {
	m := map[string]string{}
	for i := 0; i < 1500000; i++ {
		s := strconv.Itoa(i)
		m["k"+s] = "v" + s
	}
}
""",
    "bulk.sql": """CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c TEXT);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 1200000)
    INSERT INTO t SELECT i, 'name' || (i*7919 % 2000000), hex(i*31) FROM n;
""",
    "objects.rb": "rows = Array.new(600_000) { |i| { id: i, name: \"row #{i}\" } }\nputs rows.sum { |row| row[:name].size }\n",
    "array.php": '<?php $a = []; for ($i = 0; $i < 3000000; $i++) $a["key$i"] = "value$i"; echo count($a), "\\n";\n',
    "table.lua": 'local t = {} for i = 1, 400000 do t["key" .. i] = { i, "value" .. i } end print(#t)\n',
    "frame.R": "d <- data.frame(x = runif(3e6), g = sample(1000, 3e6, TRUE))\n"
               "m <- tapply(d$x, d$g, mean); s <- sort(d$x); print(length(m) + length(s))\n",
    "tree.ml": """module M = Map.Make(Int)
let () =
  let rec fill m i = if i = 0 then m else fill (M.add (i * 7919 mod 1000003) (string_of_int i) m) (i - 1) in
  print_int (M.cardinal (fill M.empty 400000))
""",
    "many.cpp": "#include <map>\n#include <string>\n#include <vector>\n" + "".join(
        f"struct S{i} {{ std::map<std::string, std::vector<int>> m; int f(int a) {{ m[std::to_string(a)].push_back({i}); "
        "return m.size(); } };\n" for i in range(250)) + "int main() { return 0; }\n",
    "page.ps": "%!PS\n0 1 40 { /k exch def 0 1 250 { /i exch def newpath i 3 mul k 7 mul moveto 300 400 i 2 mul k 30 mul 200 700 "
               "curveto i 255 div k 40 div 0.5 setrgbcolor stroke } for } for showpage\n",
    "solve.m": "a = rand(900); b = a * a'; c = b \\ a; s = cell(1, 60000); for i = 1:60000 s{i} = rand(1, 30); end; disp(size(c))\n",
    "server.js": """const sessions = new Map();
let count = 0;
require('http').createServer((request, response) => {
    const rows = Array.from({ length: 200 }, (_, i) => ({ i, name: 'row ' + i + ' of ' + count }));
    sessions.set(count, rows);
    sessions.delete(count++ - 1500);
    response.end(JSON.stringify(rows));
}).listen(%(node)d, '127.0.0.1');
process.on('SIGTERM', () => process.exit());
""",
    "Server.java": """import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.concurrent.atomic.AtomicInteger;

public class Server {
    public static void main(String[] args) throws Exception {
        var sessions = new HashMap<Integer, String[]>();
        var count = new AtomicInteger();
        var server = HttpServer.create(new InetSocketAddress("127.0.0.1", %(java)d), 0);
        server.createContext("/", exchange -> {
            int number = count.getAndIncrement();
            var rows = new String[400];
            for (int i = 0; i < rows.length; i++) rows[i] = "row " + i + " of " + number;
            sessions.put(number, rows);
            sessions.remove(number - 3000);
            var text = String.join(",", rows).getBytes();
            exchange.sendResponseHeaders(200, text.length);
            try (var body = exchange.getResponseBody()) { body.write(text); }
        });
        server.start();
    }
}
""",
    "server.go": """package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
)

func main() {
	sessions := map[int][]string{}
	count := 0
	var lock sync.Mutex
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		lock.Lock()
		defer lock.Unlock()
		rows := make([]string, 400)
		for i := range rows {
			rows[i] = fmt.Sprint("row ", i, " of ", count)
		}
		sessions[count] = rows
		delete(sessions, count-4000)
		count++
		w.Write([]byte(strings.Join(rows, ",")))
	})
	http.ListenAndServe("127.0.0.1:%(go)d", nil)
}
""",
    "server.py": """import http.server, json
sessions = {}
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.0'
    def do_GET(self):
        count = len(sessions)
        sessions[count] = rows = [{'i': i, 'name': f'row {i} of {count}'} for i in range(150)]
        text = json.dumps(rows).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(('127.0.0.1', %(python)d), Handler).serve_forever()
""",
    "server.php": '<?php $rows = []; for ($i = 0; $i < 30000; $i++) $rows[] = ["i" => $i, "name" => "row $i"]; '
                  "echo strlen(json_encode($rows));\n",
    "nginx.conf": """daemon off; worker_processes 1; pid nginx.pid; error_log stderr; user nobody nogroup;
events {}
http { access_log off; gzip on; gzip_types *; gzip_min_length 1;
    server { listen 127.0.0.1:%(nginx)d; location / { alias %(dir)s/; index text.txt; } } }
""",
    "apache.conf": """ServerRoot %(dir)s
ServerName localhost
PidFile %(dir)s/apache.pid
ErrorLog /dev/stderr
Mutex file:%(dir)s
User nobody
Group nogroup
Listen 127.0.0.1:%(apache)d
LoadModule mpm_prefork_module /usr/lib/apache2/modules/mod_mpm_prefork.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule dir_module /usr/lib/apache2/modules/mod_dir.so
LoadModule include_module /usr/lib/apache2/modules/mod_include.so
StartServers 8
MaxConnectionsPerChild 400
DocumentRoot %(dir)s
DirectoryIndex text.txt
KeepAlive Off
""",
    "fill.py": """# Stores 1,000 bytes under each of 150,000 keys.
import socket
server = socket.create_connection(('127.0.0.1', %(memcached)d))
value = b'x' * 1000
for first in range(0, 150000, 1000):
    server.sendall(b''.join(b'set key%%d 0 0 1000 noreply\\r\\n%%s\\r\\n' %% (key, value) for key in range(first, first + 1000)))
server.sendall(b'get key149999\\r\\n')
got = b''
while not got.endswith(b'END\\r\\n'):
    got += server.recv(4096)
""",
}


def real(program, *question):
    """Returns the file of `program`. The commands of pyenv and rustup start other programs of the same name."""
    found = subprocess.run([program, *question], capture_output=True, text=True).stdout.strip() if shutil.which(program) else ""
    return found or program


def servers(port, directory):
    """Returns the parts of the script of each server, and the programs that it needs."""
    database = f"setpriv --reuid=nobody --clear-groups postgres -D {directory}/pg -k {directory}/pg -c listen_addresses= -c fsync=off " \
        "-c shared_buffers=256MB"
    maria = f"mariadbd --no-defaults --user=nobody --datadir={directory}/maria --socket={directory}/maria/maria.sock --skip-networking " \
        "--skip-grant-tables --innodb-buffer-pool-size=256M --innodb-flush-log-at-trx-commit=0"
    http = lambda name, server, count, *needs: (
        {"server": server, "ready": OPEN % port[name], "load": AB % (count, port[name]), "stop": STOP}, [*needs, "ab"])
    return {
        "redis": ({
            "server": "redis-server --port 0 --unixsocket redis.sock --save '' --appendonly no --disable-thp no",
            "ready": "redis-cli -s redis.sock ping",
            "load": "redis-benchmark -s redis.sock -q -n 200000 -r 200000 -d 700 -P 32 -c 8 -t set",
            "stop": "redis-cli -s redis.sock shutdown nosave",
        }, ["redis-server", "redis-benchmark"]),
        "memcached": ({
            "server": f"memcached -u nobody -l 127.0.0.1 -p {port['memcached']} -m 1024",
            "ready": OPEN % port["memcached"], "load": "python3 fill.py", "stop": STOP,
        }, ["memcached"]),
        "postgres": ({
            "server": database, "ready": f"pg_isready -h {directory}/pg",
            "load": f"pgbench -h {directory}/pg -U nobody -S -C -c 4 -t 60 postgres; pgbench -h {directory}/pg -U nobody -S -c 4 -t 1500 postgres",
            "stop": "kill -INT $!",
        }, ["postgres", "initdb", "pgbench", "setpriv"]),
        "mariadb": ({
            "server": maria, "ready": "mariadb-admin -S maria/maria.sock ping",
            "load": "mariadb-slap -S maria/maria.sock -u root --auto-generate-sql --auto-generate-sql-write-number=1500 --number-of-queries=1500 "
                    "--concurrency=4 --auto-generate-sql-load-type=mixed --number-char-cols=4",
            "stop": "mariadb-admin -S maria/maria.sock -u root shutdown",
        }, ["mariadbd", "mariadb-slap", "mariadb-install-db"]),
        "nginx": http("nginx", f"nginx -c {directory}/nginx.conf -p {directory}", 3000, "nginx"),
        "apache": http("apache", f"setsid apache2 -D FOREGROUND -f {directory}/apache.conf", 3000, "apache2"),
        "node-http": http("node", "node server.js", 3000, "node"),
        "java-http": http("java", "java -cp . Server", 3000, "java", "javac"),
        "go-http": http("go", "./goserver", 8000, "go"),
        "python-http": http("python", f"{real('python3', '-c', 'import sys; print(sys.executable)')} server.py", 1500, "python3"),
        "php-http": http("php", f"php -S 127.0.0.1:{port['php']} server.php", 300, "php"),
    }


def commands(repository):
    """Returns the command of each program."""
    python = real("python3", "-c", "import sys; print(sys.executable)")
    rustc = pathlib.Path(real("rustc", "--print", "sysroot")) / "bin/rustc"
    return {
        "python": f"{python} dict.py",
        "perl": "perl hash.pl",
        "node": "node map.js",
        "java": "java -cp . Map",
        "go": "./gomap",
        "ruby": "ruby objects.rb",
        "php": "php -d memory_limit=-1 array.php",
        "lua": "lua5.4 table.lua",
        "R": "Rscript frame.R",
        "ocaml": "./tree",
        "pypy": "pypy3 dict.py",
        "octave": "octave-cli --no-init-file solve.m",
        "sqlite": "sqlite3 -init bulk.sql :memory: .quit",
        "gcc": "gcc -O0 -c big.c -o /dev/null",
        "clang": "clang++ -O1 -c many.cpp -o /dev/null",
        "rustc": f"{rustc} --crate-type rlib --emit metadata many.rs -o many.rmeta",
        "sort": "sort -S 400M --parallel=1 lines.txt -o /dev/null",
        "git": f"git -C {repository} fsck --full",
        "xz": "xz -3 -T1 -k -f data",
        "zstd": "zstd -q -f -5 -T1 lines.txt -o lines.zst",
        "jq": "jq length rows.json",
        "convert": "convert -size 3000x3000 plasma:fractal -resize 50% -blur 0x2 out.ppm",
        "ghostscript": "gs -q -dNOPAUSE -dBATCH -sDEVICE=ppmraw -r200 -sOutputFile=page.ppm page.ps",
    }


def prepare(directory, port):
    """Writes the sources, compiles them, and creates the databases. Steps whose programs are missing are skipped."""
    def step(*words, **options):
        if shutil.which(words[0]):
            subprocess.run(words, cwd=directory, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)

    for name, text in FILES.items():
        if name.startswith("server.") or name in ("Server.java", "nginx.conf", "apache.conf", "fill.py"):
            text = text if name == "server.php" else text % {**port, "dir": directory}
        (directory / name).write_text(text)
    body = "".join(f"int f{i}(int*a,int n){{int s={i};for(int j=0;j<n;j++){{s+=a[j]*{i};if(s>{i + 1})s^=a[(j*{i * 3})%n];else s-=j;}}"
                   "return s;}\n" for i in range(1500))
    (directory / "big.c").write_text(body)
    (directory / "many.rs").write_text("".join(
        f"pub fn f{i}(a: &[i64]) -> i64 {{ a.iter().filter(|x| **x > {i}).map(|x| x * {i + 1}).sum() }}\n" for i in range(1500)))
    place, lines = 1, []
    for i in range(1_200_000):
        place = (place * 6364136223846793005 + 1442695040888963407) % 2**64
        lines.append(f"{place:020d} line {i}\n")
    text = "".join(lines)
    (directory / "lines.txt").write_text(text)
    (directory / "data").write_text(text[:3_000_000])
    (directory / "text.txt").write_text(text[:200_000])
    (directory / "rows.json").write_text(json.dumps([{"id": i, "name": f"row {i}", "tags": ["a", str(i)]} for i in range(300_000)]))
    step("javac", "Map.java", "Server.java")
    step("go", "build", "-o", "gomap", "map.go")
    step("go", "build", "-o", "goserver", "server.go")
    step("ocamlopt", "-o", "tree", "tree.ml")
    if shutil.which("initdb"):
        (directory / "pg").mkdir()
        shutil.chown(directory / "pg", "nobody")
        nobody = ["setpriv", "--reuid=nobody", "--clear-groups"]
        step(*nobody, "initdb", "-D", f"{directory}/pg", "-A", "trust", "-U", "nobody")
        server = subprocess.Popen([*nobody, "postgres", "-D", f"{directory}/pg", "-k", f"{directory}/pg", "-c", "listen_addresses="],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while subprocess.run(["pg_isready", "-h", f"{directory}/pg"], capture_output=True).returncode and server.poll() is None:
            time.sleep(0.1)
        step("pgbench", "-h", f"{directory}/pg", "-U", "nobody", "-q", "-i", "-s", "10", "postgres")
        server.terminate()
        server.wait()
    step("mariadb-install-db", "--no-defaults", "--user=nobody", f"--datadir={directory}/maria", "--auth-root-authentication-method=normal")


def version(program):
    """Returns the first line that `program` prints about its version, if any."""
    for flag in ("--version", "-version", "-v", "-V", "version"):
        try:
            said = subprocess.run([program, flag], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = [line for line in (said.stdout + said.stderr).splitlines() if any(map(str.isdigit, line))]
        if said.returncode == 0 and lines:
            return lines[0].strip()
    return None


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def facts(rounds):
    processor = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    thp = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return {"kernel": f"{platform.system()} {platform.release()}", "processor": processor, "load_before": os.getloadavg()[0],
            "cores": os.cpu_count(), "rounds": rounds, "thp": thp[thp.find("[") + 1:thp.find("]")]}


def rows_of(record):
    """Returns the figures of each program and advice."""
    rows = {}
    for figure in map(json.loads, open(record)):
        if "metric" in figure and "workload" in figure:
            key = figure["workload"].removeprefix("advise:"), figure["setting"]
            rows.setdefault(key, {})[figure["metric"]] = figure["value"]
    return rows


def is_beyond_noise(row):
    """Returns whether the saving was predicted and measured, with an interval that does not contain 0."""
    values = [row.get(f"{name}_seconds") for name in ("measured", "predicted", "interval_from", "interval_to")]
    return None not in values and not values[2] <= 0 <= values[3]


def table(records, predictions=None):
    """Prints each saving beyond the noise beside its prediction, then the share of right signs and the median error."""
    rows = {}
    for record in records:
        # A later record of a program replaces an earlier one.
        later = rows_of(record)
        measured = {program for program, _ in later}
        rows = {key: row for key, row in rows.items() if key[0] not in measured} | later
    if predictions:
        others = rows_of(predictions)
        for key, row in rows.items():
            row["predicted_seconds"] = others.get(key, {}).get("predicted_seconds")
    signs, errors, programs = [], [], set()
    print("| program | advice | predicted | measured | 95 % | error |\n|---|---|---|---|---|---|")
    for (program, setting), row in rows.items():
        if not is_beyond_noise(row):
            continue
        measured, predicted = row["measured_seconds"], row["predicted_seconds"]
        signs.append((measured > 0) == (predicted > 0))
        errors.append(abs(predicted - measured) / abs(measured))
        programs.add(program)
        print(f"| {program} | {setting} | {predicted:.3f} | {measured:.3f} "
              f"| {row['interval_from_seconds']:.3f} to {row['interval_to_seconds']:.3f} "
              f"| {100 * errors[-1]:.0f} %{'' if signs[-1] else ', wrong sign'} |")
    if signs:
        print(f"\n{len(rows)} settings in all; {len(signs)} savings beyond the noise, of {len(programs)} programs: {sum(signs)} signs "
              f"right ({100 * sum(signs) / len(signs):.0f} %), median error {100 * statistics.median(errors):.0f} %")


def repeat(first, second):
    """Prints how much two measurements of the same saving differ, and a prediction from both."""
    first, second = rows_of(first), rows_of(second)
    both = [key for key in first if key in second and is_beyond_noise(first[key]) and is_beyond_noise(second[key])]
    if not both:
        sys.exit("the records have no saving beyond the noise in common")
    pairs = [(first[key]["measured_seconds"], second[key]["measured_seconds"], second[key]["predicted_seconds"]) for key in both]

    def median(differences):
        return 100 * statistics.median(differences)

    print(f"{len(pairs)} savings in both records; median difference of the two measurements "
          f"{median(abs(two - one) / abs(one) for one, two, _ in pairs):.0f} %; of the later prediction from their mean "
          f"{median(abs(told - (one + two) / 2) / abs((one + two) / 2) for one, two, told in pairs):.0f} %")


def pairs_of(command, directory, rounds):
    """Returns the number of pairs of runs for `command`: `rounds`, or more if one run is short."""
    start = time.monotonic()
    subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return max(rounds, min(4 * rounds, int(SECONDS / (time.monotonic() - start))))


def measure(output, rounds, names):
    faultless = shutil.which(os.environ.get("FAULTLESS", "faultless"))
    if faultless is None:
        sys.exit("faultless is not in PATH: set FAULTLESS to the command's file")
    repository = subprocess.run(["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--show-toplevel"], capture_output=True,
                                text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as name, open(output, "w") as record:
        directory = pathlib.Path(name)
        directory.chmod(0o755)
        port = {name: free_port() for name in ("memcached", "nginx", "apache", "node", "java", "go", "python", "php")}
        prepare(directory, port)
        all_commands = {name: command.split() for name, command in commands(repository).items()}
        needed = {name: [words[0]] for name, words in all_commands.items()}
        for name, (parts, needs) in servers(port, directory).items():
            script = directory / f"serve-{name}"
            script.write_text(SERVE % parts)
            script.chmod(0o755)
            all_commands[name], needed[name] = [f"./serve-{name}"], needs
        unknown = sorted(set(names) - set(all_commands))
        if unknown:
            sys.exit(f"unknown program {unknown[0]}: use one of {' '.join(all_commands)}")
        record.write(json.dumps(facts(rounds)) + "\n")
        chosen = names or list(all_commands)
        present = lambda program: shutil.which(program, path=f"{os.environ['PATH']}:{directory}") or (directory / program).exists()
        record.write(json.dumps({"versions": {name: version(COMPILED.get(name, needed[name][0])) for name in chosen}}) + "\n")
        for name in chosen:
            missing = [program for program in needed[name] if not present(program)]
            if missing:
                print(f"{name} is skipped: {missing[0]} is missing")
                continue
            print(f"== {name}: {' '.join(all_commands[name])}", flush=True)
            (directory / "result.jsonl").unlink(missing_ok=True)
            pairs = pairs_of(all_commands[name], directory, rounds)
            run = subprocess.run([faultless, "advise", "--try", "--sysfs", "--rounds", str(pairs), "--json", "result.jsonl", "--",
                                  *all_commands[name]], cwd=directory, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            print(run.stdout, flush=True)
            if run.returncode:
                print(f"{name} ended with {run.returncode}: {run.stderr[-800:]}", flush=True)
            if (directory / "result.jsonl").exists():
                for line in (directory / "result.jsonl").read_text().splitlines():
                    figure = json.loads(line)
                    figure["workload"] = f"advise:{name}"
                    record.write(json.dumps(figure) + "\n")
                record.flush()
    table([output])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--table":
        *records, predictions = sys.argv[2:] if "--predictions" in sys.argv else [*sys.argv[2:], None]
        table([record for record in records if record != "--predictions"], predictions)
    elif sys.argv[1] == "--repeat":
        if len(sys.argv) != 4:
            sys.exit("--repeat takes two records")
        repeat(*sys.argv[2:])
    else:
        measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS, sys.argv[3:])
