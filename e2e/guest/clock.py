"""clock.py SECONDS: what passes for time here.

Answers each connection to port 7100 with the wall clock, a line for each byte it is sent. Looks on each CPU at the
monotonic clock every so many seconds, and writes each timer that fires, with the seconds since it was armed, to /dev/shm/fired.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time

ARMED = 4  # seconds until the timers fire
EVERY = float(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
last = time.monotonic_ns()
gap = 0
begun = time.monotonic()


def fired(name):
    with open("/dev/shm/fired", "a") as out:
        out.write("%s %.3f\n" % (name, time.monotonic() - begun))


def watch(cpu):
    """Two looks of whichever CPUs in turn: the later one is never less. A CPU that stands still leaves a gap."""
    global last, gap
    os.sched_setaffinity(threading.get_native_id(), [cpu])
    own = time.monotonic_ns()
    while True:
        before = last
        now = time.monotonic_ns()
        if now < before:
            open("/dev/shm/back", "a").write("%d after %d on CPU %d\n" % (now, before, cpu))
        last = max(last, now)
        if now - own > gap:
            gap = now - own
            open("/dev/shm/gap", "w").write("%.3f\n" % (gap / 1e9))
        own = now
        time.sleep(EVERY)


def timerfd(clock, at, flags):
    fd = libc.timerfd_create(clock, 0)
    spec = (ctypes.c_long * 4)(0, 0, int(at), int(at % 1 * 1e9))
    assert libc.timerfd_settime(fd, flags, spec, None) == 0, ctypes.get_errno()
    return fd


def wait_for(name, fd):
    select.select([fd], [], [])
    fired(name)


def sleep():
    time.sleep(ARMED)
    fired("sleep")


def serve(peer):
    while peer.recv(1):
        peer.sendall(b"%d\n" % time.time_ns())


if os.fork() == 0:
    # A process with one thread: with more, the signal may go to one that Python's handler does not wait in.
    signal.signal(signal.SIGALRM, lambda *_: fired("alarm"))
    signal.alarm(ARMED)
    while True:
        # SIGURG ends a pause too.
        signal.pause()
waits = [
    ("timerfd", timerfd(time.CLOCK_MONOTONIC, ARMED, 0)),
    # A moment of the wall clock: due at once, where that has passed it.
    ("at", timerfd(time.CLOCK_REALTIME, time.time() + 86400, 1)),
]
threads = [(wait_for, wait) for wait in waits] + [(watch, [cpu]) for cpu in range(os.cpu_count())] + [(sleep, ())]
for work, arguments in threads:
    threading.Thread(target=work, args=arguments, daemon=True).start()
server = socket.create_server(("127.0.0.1", 7100))
open("/dev/shm/armed", "w").close()
while True:
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
