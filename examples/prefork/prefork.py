"""Preforking inside, forking outside: gunicorn and uWSGI with warm workers, in copies of one
machine.

The template (prefork.toml) is frozen while both servers wait for requests. Each guest is a copy of
that machine, so its first request finds everything loaded. Each worker is a fork of a warm master.
Memory is shared twice: among the workers of a guest, and among the guests. This program proves the
first and measures the second, before and after each worker writes to much of it.

    python3 examples/prefork/prefork.py [--guests N] [--write-mib N]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from keiki import Client, NotFoundError, Sandbox, default_client

TEMPLATE = "prefork"
SERVERS = {"gunicorn": 8000, "uWSGI": 8001}
#: Per server, as in the template.
WORKERS = 2
#: Requests within which each worker must answer, and far more than a worker answers before it is
#: recycled.
MOST_REQUESTS = 250
#: Prints, for every process below the masters: parent, process, KiB of PSS.
PSS = (
    "for master in $(pgrep -o gunicorn) $(pgrep -o pyuwsgi); do for pid in $(pgrep -P $master); do "
    "echo $master $pid $(awk '/^Pss:/ {print $2}' /proc/$pid/smaps_rollup); done; done"
)


class Failed(Exception):
    """A check failed."""


def check(holds: bool, sentence: str) -> None:
    if not holds:
        raise Failed(sentence)


class Guest:
    """A copy of the machine, and the random numbers its workers drew."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sandbox = Sandbox.create(TEMPLATE, ttl_seconds=600, client=client)
        self.draws: list[int] = []

    def get(self, server: str, path: str = "") -> dict[str, Any]:
        """Sends a request to one of its servers."""
        answer = self.client.call("GET", f"/sandboxes/{self.sandbox.id}/proxy/{SERVERS[server]}/{path}")
        self.draws += answer["draws"]
        check(answer["opened_by"] == answer["pid"], f"{server}: a worker uses another's pool: {answer}")
        check(answer["frozen"] > 1000, f"{server}: the garbage collector does not ignore shared objects")
        return dict(answer)

    def every_worker(self, server: str, path: str = "") -> list[dict[str, Any]]:
        """Returns the first answer of each worker of a server."""
        answers: dict[int, dict[str, Any]] = {}
        for _ in range(MOST_REQUESTS):
            answer = self.get(server, path)
            answers.setdefault(answer["pid"], answer)
            if len(answers) == WORKERS:
                return list(answers.values())
        raise Failed(f"{server}: {len(answers)} of {WORKERS} workers answered")

    def pss(self) -> int:
        """Memory of all workers as the guest counts it, in KiB."""
        output = self.sandbox.exec(PSS, timeout_seconds=60, check=True).stdout
        sizes = [int(line.split()[2]) for line in output.splitlines()]
        check(len(sizes) == WORKERS * len(SERVERS), f"unexpected workers:\n{output}")
        return sum(sizes)


def first_requests(guest: Guest) -> None:
    """Checks that requests in a copy import nothing, and that every worker is new."""
    for server in SERVERS:
        begun = time.monotonic()
        first = guest.get(server)
        took = (time.monotonic() - begun) * 1000
        late, modules = len(first["late"]), first["modules"]
        print(f"  {server}: first answer after {took:.0f} ms, {late} imports of {modules} modules")
        for worker in [first, *guest.every_worker(server)]:
            check(not worker["late"], f"{server}: imported during a request: {worker['late']}")
            generation = str(guest.sandbox.generation)
            check(worker["generation"] == generation, f"{server}: wrong generation: {worker}")
            # Once after the fork, and once at its first request in this copy.
            check(worker["renewed"] == 2, f"{server}: renewed {worker['renewed']} times, not twice")


def recycled(guest: Guest, server: str) -> None:
    """Checks that recycled workers are as warm: they are forked from the same master."""
    old = {worker["pid"]: worker for worker in guest.every_worker(server)}
    master = {worker["master"] for worker in old.values()}
    for count in range(MOST_REQUESTS):
        new = guest.get(server)
        if new["pid"] not in old:
            break
    else:
        raise Failed(f"{server}: no worker was recycled within {MOST_REQUESTS} requests")
    check({new["master"]} == master, f"{server}: the new worker has another master")
    check(not new["late"], f"{server}: a recycled worker imported {new['late']}")
    check(new["renewed"] == 1 and new["answered"] <= 2, f"{server}: a recycled worker is not new: {new}")
    print(f"  {server}: recycled after {count} more requests; the new worker imported nothing")
    # The finder notices imports: otherwise the checks above would prove nothing.
    check("wave" in guest.get(server, "late")["late"], f"{server}: the finder missed an import")


def memory(guests: list[Guest], when: str) -> None:
    """Prints the memory of each guest as the host counts it, and of its workers as the guest counts
    it."""
    print(f"{when}:")
    print("  guest   host: PSS   private    shared MiB   workers inside: PSS MiB")
    total = 0.0
    for number, guest in enumerate(guests):
        use = guest.sandbox.refresh().memory
        check(use is not None, "the node does not report memory use")
        assert use is not None
        total += use.pss_bytes / 2**20
        host = [part / 2**20 for part in (use.pss_bytes, use.private_bytes, use.shared_bytes)]
        inside = guest.pss() / 1024
        print(f"  {number:5} {host[0]:11.1f} {host[1]:9.1f} {host[2]:9.1f} {inside:27.1f}")
    print(f"  {len(guests)} guests x {WORKERS * len(SERVERS)} workers: {total:.1f} MiB on the host")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--guests", type=int, default=2)
    asked.add_argument("--write-mib", type=int, default=8, help="MiB that each worker writes, at most 24")
    asked = asked.parse_args()
    client = default_client()
    try:
        begun = time.monotonic()
        template = client.build_template(TEMPLATE)
    except NotFoundError:
        raise SystemExit("prefork: copy examples/prefork/prefork.toml to /etc/keiki/templates first") from None
    print(f"template {template.version[:12]}, ready after {time.monotonic() - begun:.1f} s")

    with contextlib.ExitStack() as stack:
        guests = []
        for number in range(asked.guests):
            begun = time.monotonic()
            guests.append(Guest(client))
            stack.callback(guests[-1].sandbox.kill)
            print(f"guest {number}, created in {(time.monotonic() - begun) * 1000:.0f} ms")
            first_requests(guests[-1])
        memory(guests, "before")
        for guest in guests:
            for server in SERVERS:
                guest.every_worker(server, f"write?mib={asked.write_mib}")
        memory(guests, f"after every worker wrote to {asked.write_mib} MiB of shared data")
        for server in SERVERS:
            recycled(guests[0], server)
        draws = [draw for guest in guests for draw in guest.draws]
        check(len(set(draws)) == len(draws), "two workers drew the same random number")
        print(f"{len(draws)} random numbers, all different")
    print("prefork: ok")


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        raise SystemExit(f"prefork: {error}") from None
