"""Test isolation without repeated setup: every test destroys fixtures in its own copy of the
machine.

The setup fills a database and loads it into a server's memory. Each test runs in a fork, and finds
the server as the setup left it, with its database, memory and open connection, whatever other tests
did.
"""

from __future__ import annotations

import time

from keiki import Sandbox

#: Fills a database, loads it, and serves it from memory.
SETUP = """\
import os, sqlite3
db = sqlite3.connect("/root/shop.db")
db.execute("create table orders (id integer primary key, customer integer, cents integer)")
db.executemany("insert into orders values (?, ?, ?)", ((n, n % 997, n * 37 % 10007) for n in range(60000)))
db.commit()
totals = dict(db.execute("select customer, sum(cents) from orders group by customer"))
for name in ("/run/ask", "/run/tell"):
    os.mkfifo(name)
while True:
    with open("/run/ask") as ask:
        line = ask.read()
    try:
        answer = eval(line)
    except Exception as error:
        answer = error
    with open("/run/tell", "w") as tell:
        print(answer, file=tell)
"""
#: Starts it in the background, and waits until it listens.
START = "setsid python3 /root/setup.py </dev/null >/tmp/log 2>&1 & until [ -p /run/tell ]; do sleep 0.1; done"
#: Each test: what it does, and the expected result. Each destroys what another one needs.
TESTS = {
    "all orders are there": ("db.execute('select count(*) from orders').fetchone()[0]", "60000"),
    "every customer has a total": ("len(totals)", "997"),
    "deleting empties the table": (
        "(db.execute('delete from orders'), db.execute('select count(*) from orders').fetchone())[1]",
        "(0,)",
    ),
    "totals can be dropped": ("(totals.clear(), len(totals))[1]", "0"),
    "the table can be dropped": ("(db.execute('drop table orders'), db.commit())[1]", "None"),
}


def ask(sandbox: Sandbox, line: str) -> str:
    """Evaluates a line in the server of this copy."""
    sandbox.filesystem.write("/tmp/line", line)
    result = sandbox.exec("cat /tmp/line >/run/ask && cat /run/tell", timeout_seconds=60, check=True)
    return result.stdout.strip()


def main() -> None:
    begun = time.monotonic()
    failed, spent = [], []
    with Sandbox.create(ttl_seconds=600) as warm:
        warm.filesystem.write("/root/setup.py", SETUP)
        warm.exec(START, timeout_seconds=120, check=True)
        ready = time.monotonic() - begun
        print(f"setup: {ready:.1f} s, once")
        # Start with the one that drops the table: the order must not matter.
        for name, (line, expected) in reversed(TESTS.items()):
            begun = time.monotonic()
            with warm.fork() as copy:
                result = ask(copy, line)
                spent.append(time.monotonic() - begun)
            verdict = "ok" if result == expected else "FAILED"
            print(f"  {verdict}: {name} ({spent[-1] * 1000:.0f} ms): {result}")
            if result != expected:
                failed.append(name)
    each = sum(spent) / len(spent) * 1000
    print(f"{each:.0f} ms per isolated test, instead of {ready:.1f} s of setup each")
    if failed:
        raise SystemExit(f"warm_tests: {failed}")
    print("warm_tests: ok")


if __name__ == "__main__":
    main()
