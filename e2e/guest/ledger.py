"""ledger.py write: writes random blocks of a file, and says in memory which it was told are on the disk.
ledger.py check: says whether they are.

In memory, /dev/shm/ledger, a line for each block: `NUMBER VERSION`, written once fsync said yes. A block holds its
version, something random, and the hash of both. Beside it a database with a write-ahead log: a row for each
transaction, a sum over them, and in memory the last that was committed.
"""

import fcntl
import hashlib
import mmap
import os
import random
import sqlite3
import struct
import subprocess
import sys
import threading

BLOCKS, SIZE = 64, 16384
OTHERS = 256
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
FILE, LEDGER, DATABASE = "/root/blocks", "/dev/shm/ledger", "/root/rows.db"


def shared(name, size):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    return mmap.mmap(fd, size)


def write_blocks():
    ledger = shared(LEDGER, BLOCKS * 8)
    fd = os.open(FILE, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes((BLOCKS + OTHERS) * SIZE), 0)
    os.fsync(fd)
    # What says where the file's blocks are is in its own place then, not in the journal.
    root = os.open("/", os.O_RDONLY)
    fcntl.ioctl(root, FIFREEZE, 0)
    fcntl.ioctl(root, FITHAW, 0)
    version = 0
    while True:
        version += 1
        block = random.randrange(BLOCKS)
        body = struct.pack("<Q", version) + os.urandom(SIZE - 40)
        os.pwrite(fd, body + hashlib.sha256(body).digest(), block * SIZE)
        if random.random() < 0.1:
            # Others' blocks are dirty when this one is asked for.
            os.pwrite(fd, os.urandom(4096), (BLOCKS + random.randrange(OTHERS)) * SIZE)
        os.fsync(fd)
        ledger[block * 8 : block * 8 + 8] = struct.pack("<Q", version)


def write_rows():
    committed = shared(LEDGER + ".rows", 8)
    rows = sqlite3.connect(DATABASE, isolation_level=None)
    rows.execute("PRAGMA journal_mode=WAL")
    rows.execute("PRAGMA synchronous=FULL")
    rows.execute("PRAGMA wal_autocheckpoint=20")
    rows.execute("CREATE TABLE rows (n INTEGER PRIMARY KEY, data BLOB)")
    rows.execute("CREATE TABLE total (bytes INTEGER)")
    rows.execute("INSERT INTO total VALUES (0)")
    n = 0
    while True:
        n += 1
        data = os.urandom(random.randrange(100, 9000))
        rows.execute("BEGIN")
        rows.execute("INSERT INTO rows VALUES (?, ?)", (n, data))
        rows.execute("DELETE FROM rows WHERE n = ?", (n - 200,))
        rows.execute("UPDATE total SET bytes = (SELECT sum(length(data)) FROM rows)")
        rows.execute("COMMIT")
        committed[:] = struct.pack("<Q", n)


def check_blocks():
    ledger = open(LEDGER, "rb").read()
    # From the device, past the memory that has what was never written.
    copy = "/dev/shm/blocks"
    subprocess.run(["debugfs", "-D", "-R", "dump %s %s" % (FILE, copy), "/dev/vda"], check=True, stderr=subprocess.DEVNULL)
    disk = open(copy, "rb").read()
    ahead, acknowledged = 0, 0
    for block in range(BLOCKS):
        (said,) = struct.unpack_from("<Q", ledger, block * 8)
        if said == 0:
            continue
        acknowledged += 1
        data = disk[block * SIZE : (block + 1) * SIZE]
        (version,) = struct.unpack_from("<Q", data)
        whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
        # The one that was being written when the machine was frozen may be newer, and half there.
        if version != said or not whole:
            ahead += 1
        assert version >= said or not whole, "block %d: version %d on the disk, %d was said to be" % (block, version, said)
    assert ahead <= 1, "%d blocks are not what was acknowledged" % ahead
    return acknowledged


def check_rows():
    (said,) = struct.unpack("<Q", open(LEDGER + ".rows", "rb").read())
    rows = sqlite3.connect(DATABASE)
    assert rows.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    last, sum, count = rows.execute("SELECT max(n), sum(length(data)), count(*) FROM rows").fetchone()
    assert said <= last <= said + 1, "row %d is the last, %d were committed" % (last, said)
    assert (sum,) == rows.execute("SELECT bytes FROM total").fetchone()
    assert count == min(last, 200)
    return said


if sys.argv[1] == "write":
    threading.Thread(target=write_rows, daemon=True).start()
    write_blocks()
print(check_blocks(), check_rows())
