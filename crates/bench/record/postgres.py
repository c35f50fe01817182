#!/usr/bin/env python3
"""Runs the regression scripts of PostgreSQL on an installed server, with or without advice of `faultless run`.

    postgres.py SOURCE FOLDER [ADVICE]

SOURCE is the unpacked source of the same version as the installed server, with `regress.so` built in `src/test/regress`.
FOLDER is replaced; FOLDER/results contains the output of each script, to be compared between two runs. Run it as a user
other than root. FAULTLESS is the command, and PGBIN the folder of the server's programs.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

FAULTLESS = shutil.which(os.environ.get("FAULTLESS", "faultless"))
PROGRAMS = pathlib.Path(os.environ.get("PGBIN", "/usr/lib/postgresql/15/bin"))
SETTINGS = ["lc_messages TO 'C'", "lc_monetary TO 'C'", "lc_numeric TO 'C'", "lc_time TO 'C'", "bytea_output TO 'hex'",
            "timezone_abbreviations TO 'Default'"]


def text(file):
    """Returns the contents of a file, with the white space that pg_regress ignores made equal."""
    return re.sub(rb"[ \t]+", b" ", file.read_bytes()).replace(b" \n", b"\n")


def main():
    tests, folder = pathlib.Path(sys.argv[1]).absolute() / "src/test/regress", pathlib.Path(sys.argv[2]).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "results").mkdir(parents=True)
    (folder / "testtablespace").mkdir()
    environment = dict(os.environ, PG_ABS_SRCDIR=str(tests), PG_ABS_BUILDDIR=str(folder), PG_LIBDIR=str(tests), PG_DLSUFFIX=".so",
                       PGTZ="PST8PDT", PGDATESTYLE="Postgres, MDY", PGOPTIONS="-c intervalstyle=postgres_verbose",
                       PGHOST=str(folder), PGUSER="postgres", LC_ALL="C", XDG_CACHE_HOME=str(folder / "cache"))
    subprocess.run([PROGRAMS / "initdb", "-D", folder / "data", "-A", "trust", "-U", "postgres", "--no-locale", "-E", "SQL_ASCII",
                    "-N"], check=True, stdout=subprocess.DEVNULL, env=environment)
    run = [FAULTLESS, "run", "--apply", sys.argv[3], "--report", "--json", folder / "report.json", "--"] if len(sys.argv) > 3 else []
    server = [PROGRAMS / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off",
              "-c", "max_prepared_transactions=2"]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen([*run, *server], env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        while subprocess.run(["pg_isready", "-q"], env=environment).returncode:
            if server.poll() is not None:
                raise SystemExit(f"the server does not start: see {folder}/log")
            time.sleep(0.1)
        query = ["psql", "-X", "-q", "-d"]
        subprocess.run([*query, "postgres", "-c", "CREATE DATABASE regression TEMPLATE=template0"], env=environment, check=True)
        for setting in SETTINGS:
            alter = f"ALTER DATABASE regression SET {setting}"
            subprocess.run([*query, "postgres", "-c", alter], env=environment, check=True)

        def start(name):
            with open(tests / "sql" / f"{name}.sql") as script, open(folder / "results" / f"{name}.out", "w") as out:
                words = [*query, "regression", "-a", "-v", "HIDE_TABLEAM=on", "-v", "HIDE_TOAST_COMPRESSION=on"]
                return subprocess.Popen(words, stdin=script, stdout=out, stderr=subprocess.STDOUT, cwd=folder,
                                        env=environment | {"PGAPPNAME": f"pg_regress/{name}"})

        passed, failed = 0, []
        for line in (tests / "parallel_schedule").read_text().splitlines():
            if not line.startswith("test:"):
                continue
            for name, process in [(name, start(name)) for name in line[5:].split()]:
                process.wait()
                expected = [tests / "expected" / f"{name}{form}.out" for form in ["", "_0", "_1", "_2", "_3", "_4"]]
                got = text(folder / "results" / f"{name}.out")
                if any(got == text(file) for file in expected if file.exists()):
                    passed += 1
                else:
                    failed.append(name)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    print(f"{passed} scripts pass, {len(failed)} fail: {', '.join(failed)}; the server ended with status {server.returncode}")


main()
