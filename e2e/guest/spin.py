"""spin.py WHAT FILE: draws without a pause. A line of FILE is the time before in ns, and the values drawn then. In a
copy it stops after some lines, and makes FILE.end.
spin.py: draws once of each kind."""

import os
import sys
import time


def kernel():
    import uuid

    return lambda: (os.urandom(16).hex(), uuid.uuid4().hex)


def python():
    import keiki_generation
    import random

    keiki_generation.on_copy(lambda: open("/dev/shm/told", "a").write("told\n"))

    return lambda: (random.random().hex(), "%032x" % random.getrandbits(128))


def numpy():
    import numpy
    import random

    return lambda: (numpy.random.rand().hex(), numpy.random.bytes(16).hex(), random.random().hex())


def tls():
    import ssl

    context = ssl.create_default_context()

    def hello():
        out = ssl.MemoryBIO()
        session = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="keiki.test")
        try:
            session.do_handshake()
        except ssl.SSLWantReadError:
            pass
        return client_hello(out.read())

    return hello


def client_hello(record):
    """Random, session ID and first key share (RFC 8446, 4.1.2 and 4.2.8)."""
    body = record[9:]
    random, rest = body[2:34], body[34:]
    session, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
    rest = rest[2 + int.from_bytes(rest[:2], "big") :]  # cipher suites
    rest = rest[1 + rest[0] :]  # compression methods
    rest = rest[2:]  # length of the extensions
    while rest:
        kind, size = int.from_bytes(rest[:2], "big"), int.from_bytes(rest[2:4], "big")
        if kind == 51:
            share = rest[10 : 4 + size]
            return random.hex(), session.hex(), share.hex()
        rest = rest[4 + size :]
    raise SystemExit("no key share in " + record.hex())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(*kernel()(), *python()(), *tls()())
        raise SystemExit
    draw = {"kernel": kernel, "python": python, "numpy": numpy, "tls": tls}[sys.argv[1]]()
    generation = os.open("/run/keiki/generation", os.O_RDONLY)
    first = os.pread(generation, 100, 0)
    left = 40 if sys.argv[1] == "tls" else 400
    with open(sys.argv[2], "w", buffering=1) as out:
        while left:
            out.write("%d %s\n" % (time.time_ns(), " ".join(draw())))
            left -= os.pread(generation, 100, 0) != first
    open(sys.argv[2] + ".end", "w").close()
