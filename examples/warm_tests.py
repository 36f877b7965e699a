"""Test isolation without set-up: the fixtures are made once, and every test wrecks its own copy of the machine.

The set-up fills a database and loads it into a server's memory. Each test then runs in a fork: it meets the server
as the set-up left it, database, memory, open connection and all, whatever the tests before it have done.
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
        said = eval(line)
    except Exception as error:
        said = error
    with open("/run/tell", "w") as tell:
        print(said, file=tell)
"""
#: A test: what it does, and what it must see. Each destroys what another looks at.
TESTS = {
    "all orders are there": ("db.execute('select count(*) from orders').fetchone()[0]", "60000"),
    "every customer has a total": ("len(totals)", "997"),
    "deleting empties the table": (
        "(db.execute('delete from orders').rowcount, db.commit(), db.execute('select count(*) from orders').fetchone()[0])[::2]",
        "(60000, 0)",
    ),
    "totals can be dropped": ("(totals.clear(), len(totals))[1]", "0"),
    "the table can go": ("(db.execute('drop table orders'), db.commit())[1]", "None"),
}


def ask(sandbox: Sandbox, line: str) -> str:
    """Has the server in this copy evaluate something."""
    sandbox.filesystem.write("/tmp/line", line)
    result = sandbox.exec("cat /tmp/line >/run/ask && cat /run/tell", timeout_seconds=60, check=True)
    return result.stdout.strip()


def main() -> None:
    begun = time.monotonic()
    failed, spent = [], []
    with Sandbox.create(ttl_seconds=600) as warm:
        warm.filesystem.write("/root/setup.py", SETUP)
        warm.exec("setsid python3 /root/setup.py </dev/null >/tmp/log 2>&1 & until [ -p /run/tell ]; do sleep 0.1; done")
        ready = time.monotonic() - begun
        print(f"set-up: {ready:.1f} s, once")
        # The one that drops the table first: order must not matter.
        for name, (line, expected) in reversed(TESTS.items()):
            begun = time.monotonic()
            with warm.fork() as copy:
                said = ask(copy, line)
                spent.append(time.monotonic() - begun)
            print(f"  {'ok' if said == expected else 'FAILED'}: {name} ({spent[-1] * 1000:.0f} ms): {said}")
            if said != expected:
                failed.append(name)
    print(f"isolated and run: {sum(spent) / len(spent) * 1000:.0f} ms a test, instead of {ready:.1f} s of set-up each")
    if failed:
        raise SystemExit(f"warm_tests: {failed}")
    print("warm_tests: ok")


if __name__ == "__main__":
    main()
