"""Trees as tar streams, without a node: what is packed, and what is refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import unittest
from pathlib import Path

from twins import both
from wire import SANDBOX, WireTest, answer, chunked, hang_up

import keiki
from keiki._archive import Packed, unpack


def tar(*entries: tuple[str, bytes, str]) -> bytes:
    """An archive of these names, kinds and link targets; a file holds ``x``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, target in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, target, 0o6755
            info.size = 1 if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"x"))
    return out.getvalue()


FILE, LINK, HARD, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


class Scratch(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        made = tempfile.TemporaryDirectory(prefix="keiki-trees-")
        self.addCleanup(made.cleanup)
        self.dir = Path(made.name)
        self.tree = self.dir / "tree"
        (self.tree / "sub" / "empty").mkdir(parents=True)
        (self.tree / "sub" / "é\n").write_bytes(os.urandom(150_000))
        (self.tree / "a").write_text("one")
        (self.tree / "block").write_bytes(bytes(512))
        (self.tree / "nothing").touch()
        (self.tree / "a").chmod(0o750)
        os.link(self.tree / "a", self.tree / "b")
        (self.tree / "away").symlink_to("/etc/passwd")
        (self.tree / "dir").symlink_to("sub")
        os.mkfifo(self.tree / "pipe")

    def seen(self, root: Path) -> dict[str, object]:
        """What is where."""
        return {
            str(path.relative_to(root)): os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else "dir"
            for path in root.rglob("*")
            if not path.is_fifo()
        }


class Archives(Scratch):
    def test_what_is_packed_is_what_comes_out(self) -> None:
        packed = Packed(self.tree)
        pieces = [packed.read(7000)]
        while pieces[-1]:
            pieces.append(packed.read(7000))
        self.assertTrue(all(len(piece) <= 7000 for piece in pieces))
        whole = b"".join(pieces)
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            self.assertNotIn("top/pipe", archive.getnames())
            self.assertEqual([m.name for m in archive.getmembers() if m.islnk()], ["top/b"])
        unpack(io.BytesIO(whole), self.dir / "out")
        self.assertEqual(self.seen(self.dir / "out"), self.seen(self.tree))
        self.assertEqual((self.dir / "out" / "a").stat().st_mode & 0o7777, 0o750)
        self.assertTrue(os.path.samefile(self.dir / "out" / "a", self.dir / "out" / "b"))
        with self.assertRaises(FileExistsError):
            unpack(io.BytesIO(whole), self.dir / "out")
        with self.assertRaisesRegex(keiki.ArchiveError, "refused"):
            unpack(io.BytesIO(whole[:5000]), self.dir / "cut")

    def test_a_hostile_archive_leaves_nothing(self) -> None:
        victim = self.dir / "victim"
        victim.write_text("mine")
        up, outside = "../victim", str(self.dir)
        hostile = {
            "a name that leads out": [("t", DIR, ""), ("t/../../victim", FILE, "")],
            "a hard link to a file outside": [("t", DIR, ""), ("t/h", HARD, up), ("t/h", FILE, "")],
            "a file through a symlink": [("t", DIR, ""), ("t/s", LINK, outside), ("t/s/victim", FILE, "")],
            "a symlink through a symlink": [("t", DIR, ""), ("t/s", LINK, outside), ("t/s/new", LINK, "x")],
            "a symlink that leads out by its name": [("t", DIR, ""), ("t/../../new", LINK, "x")],
            "a device": [("t", tarfile.CHRTYPE, "")],
            "two tops": [("t", FILE, ""), ("u", FILE, "")],
            "nothing": [],
        }
        before = sorted(os.listdir(self.dir))
        for name, entries in hostile.items():
            with self.subTest(name):
                with self.assertRaises(keiki.ArchiveError):
                    unpack(io.BytesIO(tar(*entries)), self.dir / "out")
                self.assertEqual(sorted(os.listdir(self.dir)), before)
                self.assertEqual(victim.read_text(), "mine")
        unpack(io.BytesIO(tar(("t", FILE, ""))), self.dir / "out")
        self.assertEqual((self.dir / "out").stat().st_mode & 0o7777, 0o755, "no set-user-ID")


@both
class Trees(Scratch, WireTest):
    def setUp(self) -> None:
        super().setUp()
        self.files = self.api.Sandbox(SANDBOX, self.client).filesystem

    def test_a_tree_is_streamed_up(self) -> None:
        counts = {"path": "/app", "files": 3, "dirs": 3, "symlinks": 2, "bytes": 150_006}
        self.script(answer(204), answer(200, counts))
        done = self.files.upload(self.tree, "/app")
        self.assertEqual((done.files, done.symlinks, done.bytes), (3, 2, 150_006))
        made, sent = self.requests
        self.assertEqual(made.json(), {"path": "/app", "recursive": True})
        self.assertEqual(sent.path.partition("?")[2], "path=%2Fapp&strip_top=true")
        self.assertEqual(sent.headers["Transfer-Encoding"], "chunked")
        unpack(io.BytesIO(sent.body), self.dir / "out")
        self.assertEqual(self.seen(self.dir / "out"), self.seen(self.tree))

        self.script(answer(204), answer(200, counts))
        (self.dir / "link").symlink_to(self.tree / "a")
        self.files.upload(self.dir / "link", "/etc/other", owners=True)
        self.assertEqual(self.requests[-1].path.partition("?")[2], "path=%2Fetc&owners=true")
        with tarfile.open(fileobj=io.BytesIO(self.requests[-1].body)) as archive:
            self.assertEqual([(one.name, one.size) for one in archive.getmembers()], [("other", 3)])
        count = len(self.requests)
        with self.assertRaises(FileNotFoundError):
            self.files.upload(self.dir / "nope", "/app")
        self.assertEqual(len(self.requests), count, "nothing was asked for")

    def test_a_tree_comes_down_whole_or_not_at_all(self) -> None:
        packed = Packed(self.tree)
        whole = b"".join(iter(lambda: packed.read(60_000), b""))
        pieces = [whole[at : at + 50_000] for at in range(0, len(whole), 50_000)]
        self.script(chunked(*pieces), chunked(*pieces[:-1], finish=False), answer(404, {"error": "no /x"}))
        self.files.download("/app", self.dir / "out")
        self.assertEqual(self.seen(self.dir / "out"), self.seen(self.tree))
        before = sorted(os.listdir(self.dir))
        with self.assertRaises(keiki.ConnectionError):
            self.files.download("/app", self.dir / "cut")
        with self.assertRaises(keiki.NotFoundError):
            self.files.download("/x", self.dir / "none")
        self.assertEqual(sorted(os.listdir(self.dir)), before)

    def test_changes_are_told_until_the_end(self) -> None:
        def event(kind: str, **data: object) -> bytes:
            said = {"kind": kind, "path": "/w", "is_dir": False, **data}
            return f"event: {kind}\ndata: {json.dumps(said)}\n\n".encode()

        told = event("ready") + b": ping\n\n" + event("moved", **{"from": "/w/a", "path": "/w/b"})
        self.script(chunked(told), chunked(event("ready"), b'event: error\ndata: {"error":"gone"}\n\n'))
        got = list(self.files.watch("/w", recursive=True))
        self.assertEqual([(one.kind, one.path, one.old_path) for one in got][1:], [("moved", "/w/b", "/w/a")])
        self.assertEqual(self.requests[0].path.partition("?")[2], "path=%2Fw&recursive=true")
        with self.assertRaisesRegex(keiki.ServerError, "gone"):
            list(self.files.watch("/w"))
        self.script(chunked(event("ready"), finish=False), hang_up)
        with self.assertRaises(keiki.ConnectionError):
            list(self.files.watch("/w"))


if __name__ == "__main__":
    unittest.main()
