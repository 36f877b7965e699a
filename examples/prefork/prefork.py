"""Preforking inside, forking outside: gunicorn and uWSGI with warm workers, in machines that are copies of one.

The template (prefork.toml) is baked while both servers wait for requests. Each guest is a copy of that machine, so its
first request finds everything loaded; each worker is a fork of a warm master. Memory is shared twice: by the workers of
a guest, and by the guests. This program proves the first and counts the second, before and after much is written.

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
#: Of each server, as the template says.
WORKERS = 2
#: Requests in which each worker must have had its turn, and far more than one answers before it is recycled.
MOST_REQUESTS = 250
#: Prints, for every process below the masters: parent, process, KiB of PSS.
PSS = (
    "for master in $(pgrep -o gunicorn) $(pgrep -o pyuwsgi); do for pid in $(pgrep -P $master); do "
    "echo $master $pid $(awk '/^Pss:/ {print $2}' /proc/$pid/smaps_rollup); done; done"
)


class Failed(Exception):
    """Something is not as it must be."""


def check(holds: bool, sentence: str) -> None:
    if not holds:
        raise Failed(sentence)


class Guest:
    """A copy of the machine, and what its workers said."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sandbox = Sandbox.create(TEMPLATE, ttl_seconds=600, client=client)
        self.draws: list[int] = []

    def get(self, server: str, path: str = "") -> dict[str, Any]:
        """One request to one of its servers."""
        answer = self.client.call("GET", f"/sandboxes/{self.sandbox.id}/proxy/{SERVERS[server]}/{path}")
        self.draws += answer["draws"]
        check(answer["opened_by"] == answer["pid"], f"{server}: a worker uses the pool of another: {answer}")
        check(answer["frozen"] > 1000, f"{server}: the collector was not told to leave alone what is shared")
        return dict(answer)

    def every_worker(self, server: str, path: str = "") -> list[dict[str, Any]]:
        """The first answer of each worker of a server."""
        answers: dict[int, dict[str, Any]] = {}
        for _ in range(MOST_REQUESTS):
            answer = self.get(server, path)
            answers.setdefault(answer["pid"], answer)
            if len(answers) == WORKERS:
                return list(answers.values())
        raise Failed(f"{server}: {len(answers)} of {WORKERS} workers answered")

    def pss(self) -> int:
        """What all workers take, as the guest counts it, in KiB."""
        said = self.sandbox.exec(PSS, timeout_seconds=60, check=True).stdout
        sizes = [int(line.split()[2]) for line in said.splitlines()]
        check(len(sizes) == WORKERS * len(SERVERS), f"not the workers that were started:\n{said}")
        return sum(sizes)


def first_requests(guest: Guest) -> None:
    """In a copy: nothing is loaded, and every worker is new."""
    for server in SERVERS:
        begun = time.monotonic()
        first = guest.get(server)
        took = (time.monotonic() - begun) * 1000
        print(f"  {server}: first answer after {took:.0f} ms, {len(first['late'])} imports of {first['modules']} modules")
        for worker in [first, *guest.every_worker(server)]:
            check(not worker["late"], f"{server}: imported in a request: {worker['late']}")
            check(worker["generation"] == str(guest.sandbox.generation), f"{server}: of another machine: {worker}")
            # Once after the fork and once in this copy, whenever its first request came.
            check(worker["renewed"] == 2, f"{server}: renewed {worker['renewed']} times, not after fork and copy")


def recycled(guest: Guest, server: str) -> None:
    """Workers are replaced, and the new ones are as warm: they are forked of the same master."""
    old = {worker["pid"]: worker for worker in guest.every_worker(server)}
    master = {worker["master"] for worker in old.values()}
    for count in range(MOST_REQUESTS):
        new = guest.get(server)
        if new["pid"] not in old:
            break
    else:
        raise Failed(f"{server}: no worker was recycled in {MOST_REQUESTS} requests")
    check({new["master"]} == master, f"{server}: the master was replaced")
    check(not new["late"], f"{server}: a recycled worker imported {new['late']}")
    check(new["renewed"] == 1 and new["answered"] <= 2, f"{server}: a recycled worker is not new: {new}")
    print(f"  {server}: recycled after {count} more requests, the new worker imported nothing")
    # What is not warm is seen: else the lines above would say nothing.
    check("wave" in guest.get(server, "late")["late"], f"{server}: an import was not noticed")


def memory(guests: list[Guest], when: str) -> None:
    """A line for each guest: what the host counts for the machine, what the guest counts for its workers."""
    print(f"{when}:")
    print("  guest   host: PSS   private    shared MiB   workers inside: PSS MiB")
    total = 0.0
    for number, guest in enumerate(guests):
        use = guest.sandbox.refresh().memory
        check(use is not None, "the node does not count memory")
        assert use is not None
        total += use.pss_bytes / 2**20
        host = [part / 2**20 for part in (use.pss_bytes, use.private_bytes, use.shared_bytes)]
        inside = guest.pss() / 1024
        print(f"  {number:5} {host[0]:11.1f} {host[1]:9.1f} {host[2]:9.1f} {inside:27.1f}")
    print(f"  {len(guests)} guests x {WORKERS * len(SERVERS)} workers: {total:.1f} MiB of the host's")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--guests", type=int, default=2)
    asked.add_argument("--write-mib", type=int, default=8, help="written by each worker, at most 24")
    asked = asked.parse_args()
    client = default_client()
    try:
        begun = time.monotonic()
        template = client.build_template(TEMPLATE)
    except NotFoundError:
        raise SystemExit("prefork: first copy examples/prefork/prefork.toml to /etc/keiki/templates") from None
    print(f"template {template.version[:12]}, ready after {time.monotonic() - begun:.1f} s")

    with contextlib.ExitStack() as stack:
        guests = []
        for number in range(asked.guests):
            begun = time.monotonic()
            guests.append(Guest(client))
            stack.callback(guests[-1].sandbox.kill)
            print(f"guest {number}, made in {(time.monotonic() - begun) * 1000:.0f} ms")
            first_requests(guests[-1])
        memory(guests, "before")
        for guest in guests:
            for server in SERVERS:
                guest.every_worker(server, f"write?mib={asked.write_mib}")
        memory(guests, f"after every worker wrote to {asked.write_mib} MiB of what all share")
        for server in SERVERS:
            recycled(guests[0], server)
        draws = [draw for guest in guests for draw in guest.draws]
        check(len(set(draws)) == len(draws), "two workers drew the same random number")
        print(f"{len(draws)} random numbers, no two alike")
    print("prefork: ok")


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        raise SystemExit(f"prefork: {error}") from None
