"""talk.py: a client of Redis over TCP and over a unix socket, and words through a pipe, all without a pause.

Each is one connection, opened once. /dev/shm/talked has three numbers: how often each was answered, and rightly. A
connection that ends, or answers wrongly, ends the program and leaves why in /dev/shm/ended.
"""

import os
import socket
import subprocess
import time


def answers(file, connection, n):
    connection.sendall(b"INCR %s\r\n" % file)
    answer = connection.recv(100)
    assert answer == b":%d\r\n" % n, answer
    return n


tcp = socket.create_connection(("127.0.0.1", 6379))
unix = socket.socket(socket.AF_UNIX)
unix.connect("/run/redis.sock")
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
n = 0
try:
    while True:
        n += 1
        counts = [answers(b"tcp", tcp, n), answers(b"unix", unix, n)]
        cat.stdin.write(b"%d\n" % n)
        assert cat.stdout.read(100) == b"%d\n" % n
        counts.append(n)
        with open("/dev/shm/next", "w") as out:
            out.write(" ".join(map(str, counts)))
        os.replace("/dev/shm/next", "/dev/shm/talked")
        time.sleep(0.005)
except BaseException as error:
    open("/dev/shm/ended", "w").write(repr(error))
