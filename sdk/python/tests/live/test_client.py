"""Each call of the package once, in a real guest."""

from __future__ import annotations

import http.client
import io
import os
import tarfile
import tempfile
import time
import unittest
import urllib.parse
from pathlib import Path

import keiki
from keiki import Sandbox, Snapshot
from live import LiveTest


class Shared(LiveTest):
    """Tests that can share one sandbox."""

    sandbox: Sandbox

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.sandbox = Sandbox.create(template="base", ttl_seconds=600, metadata={"test": "client"})

    @classmethod
    def tearDownClass(cls) -> None:
        cls.sandbox.kill()


class Exec(Shared):
    def test_streams_code_and_surroundings(self) -> None:
        result = self.sandbox.exec(
            'echo "$GREETING $PWD $(id -un)"; cat; echo oops >&2; exit 7',
            env={"GREETING": "hé llo"},
            cwd="/tmp",
            user="nobody",
            stdin="in\n",
        )
        self.assertEqual(result.stdout, "hé llo /tmp nobody\nin\n")
        self.assertEqual((result.stderr, result.exit_code, result.truncated), ("oops\n", 7, False))

    def test_argv_is_not_read_by_a_shell(self) -> None:
        result = self.sandbox.exec(["printf", "%s|", "$HOME", "a b", "", "*"])
        self.assertEqual(result.stdout, "$HOME|a b||*|")

    def test_bytes(self) -> None:
        every = bytes(range(256))
        self.assertEqual(self.sandbox.exec("cat", stdin=every).stdout_bytes, every)
        out: list[str] = []
        result = self.sandbox.exec("cat", stdin=every, on_stdout=out.append)
        self.assertEqual(result.stdout_bytes, every)

    def test_codes_of_a_shell(self) -> None:
        codes = [
            self.sandbox.exec(argv).exit_code
            for argv in (["/no/such"], ["/etc/passwd"], ["sh", "-c", "kill -9 $$"])
        ]
        self.assertEqual(codes, [127, 126, 137])

    def test_streamed_as_it_comes(self) -> None:
        seen: list[tuple[str, float]] = []
        started = time.monotonic()
        result = self.sandbox.exec(
            "echo one; sleep 1; echo two >&2",
            on_stdout=lambda text: seen.append((text, time.monotonic() - started)),
            on_stderr=lambda text: seen.append((text, time.monotonic() - started)),
        )
        self.assertEqual([text for text, _ in seen], ["one\n", "two\n"])
        self.assertGreater(seen[1][1] - seen[0][1], 0.5)
        self.assertEqual((result.stdout, result.stderr, result.exit_code), ("one\n", "two\n", 0))

    def test_timeout_kills_every_process(self) -> None:
        for callback in (None, lambda _: None):
            started = time.monotonic()
            with self.assertRaises(keiki.SandboxTimeout):
                self.sandbox.exec("sleep 4321 & sleep 4321", timeout_seconds=1, on_stdout=callback)
            self.assertLess(time.monotonic() - started, 10)
        cmdlines = self.sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        self.assertNotIn("sleep 4321", cmdlines)

    def test_large_output(self) -> None:
        size = 17 << 20
        buffered = self.sandbox.exec(f"head -c {size} /dev/zero")
        self.assertEqual((len(buffered.stdout_bytes), buffered.truncated), (16 << 20, True))
        got = sum(
            len(event.data) for event in self.sandbox.exec_stream(f"head -c {size} /dev/zero | tr '\\0' x")
        )
        self.assertEqual(got, size)


class Commands(Shared):
    def test_a_command_goes_on_without_its_caller_and_in_a_fork(self) -> None:
        command = self.sandbox.start("while read line; do echo got $line; done; exit 4", stdin_open=True)
        self.assertEqual(command.write("one\n"), 4)
        with command.stream() as events:
            self.assertEqual(next(events).text, "got one\n")
        child = self.keep(self.sandbox.fork())
        copy = child.command(command.id)
        copy.write("two\n", eof=True)
        self.assertEqual(copy.wait(30), 4)
        self.assertEqual("".join(event.text for event in copy.stream()), "got one\ngot two\n")
        self.assertIsNone(command.refresh().exit_code)
        self.assertIn(command.id, [other.id for other in self.sandbox.commands()])
        command.signal("KILL")
        self.assertEqual(command.wait(30), 137)
        self.assertEqual("".join(event.text for event in command.stream(stdout_offset=4)), "one\n")
        command.kill()
        with self.assertRaises(keiki.NotFoundError):
            command.refresh()


class Files(Shared):
    def test_contents(self) -> None:
        files = self.sandbox.filesystem
        data = bytes(range(256)) * 4096
        for name in ("plain", "with space", "new\nline", "日本 é", "+&=?#%"):
            path = f"/tmp/files/{name}"
            self.assertEqual(files.write(path, data), len(data))
            self.assertEqual(files.read(path), data)
            self.assertEqual(files.stat(path).size, len(data))
        names = sorted(entry.name for entry in files.list("/tmp/files"))
        self.assertEqual(names, sorted(["plain", "with space", "new\nline", "日本 é", "+&=?#%"]))
        self.assertEqual(files.write("/tmp/empty", ""), 0)
        self.assertEqual(files.read("/tmp/empty"), b"")

    def test_streams(self) -> None:
        files = self.sandbox.filesystem
        data = b"0123456789abcdef" * (3 << 16)
        self.assertEqual(files.write("/root/large", io.BytesIO(data), mode=0o600), len(data))
        self.assertEqual(b"".join(files.read_stream("/root/large")), data)
        self.assertEqual(files.stat("/root/large").mode, "0600")

    def test_changes(self) -> None:
        files = self.sandbox.filesystem
        files.mkdir("/tmp/a/b", parents=True, mode=0o750)
        files.write("/tmp/a/b/f", "x")
        files.chmod("/tmp/a/b/f", 0o755)
        files.symlink("/tmp/a/b/f", "/tmp/a/link")
        files.rename("/tmp/a/b", "/tmp/a/c")
        self.assertEqual(files.stat("/tmp/a/c/f").mode, "0755")
        link = files.stat("/tmp/a/link")
        self.assertEqual((link.kind, link.target, link.is_dir), ("symlink", "/tmp/a/b/f", False))
        self.assertTrue(files.stat("/tmp/a/c").is_dir)
        self.assertFalse(files.exists("/tmp/a/b"))
        with self.assertRaises(keiki.KeikiError):
            files.remove("/tmp/a")
        files.remove("/tmp/a", recursive=True)
        self.assertFalse(files.exists("/tmp/a"))

    def test_missing(self) -> None:
        files = self.sandbox.filesystem
        for call in (files.read, files.stat, files.list, files.remove):
            with self.assertRaises(keiki.NotFoundError):
                call("/nope")
        self.assertFalse(files.exists("/nope"))


class Trees(Shared):
    def test_a_tree_goes_up_and_comes_down(self) -> None:
        files = self.sandbox.filesystem
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / "tree"
            (local / "sub").mkdir(parents=True)
            (local / "sub" / "tool").write_bytes(bytes(range(256)) * 2000)
            (local / "sub" / "tool").chmod(0o750)
            (local / "link").symlink_to("sub/tool")
            done = files.upload(local, "/root/up")
            self.assertEqual((done.files, done.dirs, done.symlinks, done.bytes), (1, 2, 1, 512_000))
            shown = self.sandbox.exec("cd /root/up; stat -c '%a %U' sub/tool; readlink link", check=True)
            self.assertEqual(shown.stdout, "750 root\nsub/tool\n")
            files.upload(local / "sub" / "tool", "/root/up/alone", owners=True)
            self.sandbox.exec("cmp /root/up/alone /root/up/sub/tool", check=True)

            files.download("/root/up", Path(scratch) / "down")
            self.assertEqual((Path(scratch) / "down" / "sub" / "tool").stat().st_mode & 0o777, 0o750)
            for name in ("alone", "link"):
                down = (Path(scratch) / "down" / name).read_bytes()
                self.assertEqual(down, (local / "sub" / "tool").read_bytes())
            with self.assertRaises(keiki.NotFoundError):
                files.download("/nope", Path(scratch) / "none")
            self.assertEqual(sorted(os.listdir(scratch)), ["down", "tree"])

    def test_archives_as_they_are(self) -> None:
        files = self.sandbox.filesystem
        self.sandbox.exec("mkdir -p /root/ar/in /root/to && echo x >/root/ar/in/f", check=True)
        data = b"".join(files.read_archive("/root/ar"))
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            self.assertIn("ar/in/f", [name.rstrip("/") for name in archive.getnames()])
        files.write_archive("/root/to", io.BytesIO(data), strip_top=True)
        self.assertEqual(files.read("/root/to/in/f"), b"x\n")
        with self.assertRaisesRegex(keiki.BadRequestError, "incomplete"):
            files.write_archive("/root/to", data[:700])

    def test_changes_are_told(self) -> None:
        files = self.sandbox.filesystem
        files.mkdir("/root/watched")
        with files.watch("/root/watched", recursive=True) as events:
            self.assertEqual(next(events).kind, "ready")
            self.sandbox.exec("cd /root/watched; echo 1 >a; mv a b; rm b", check=True)
            seen = []
            for event in events:
                seen.append((event.kind, event.path.rpartition("/")[2], event.old_path))
                if event.kind == "removed":
                    break
        self.assertEqual(seen[0], ("created", "a", None))
        self.assertIn(("moved", "b", "/root/watched/a"), seen)
        self.assertEqual(seen[-1], ("removed", "b", None))
        with self.assertRaises(keiki.NotFoundError):
            next(files.watch("/nope"))


class LookingIn(Shared):
    def test_ports_and_previews(self) -> None:
        serve = self.sandbox.start("cd /etc && exec python3 -m http.server 8123")
        self.addCleanup(serve.kill)
        end = time.monotonic() + 60
        while not (found := [port for port in self.sandbox.ports() if port.port == 8123]):
            self.assertLess(time.monotonic(), end, "nothing listens")
            time.sleep(0.3)
        self.assertEqual((found[0].pid, found[0].process), (serve.pid, "python3"))
        link = self.sandbox.preview(8123, ttl_seconds=60)
        self.assertEqual(link.port, 8123)
        # Names under localhost are this machine's; not every resolver knows that.
        parts = urllib.parse.urlsplit(link.url)
        self.assertTrue((parts.hostname or "").startswith(f"8123-{self.sandbox.id}."), link.url)
        node = urllib.parse.urlsplit(os.environ["KEIKI_URL"])
        browser = http.client.HTTPConnection(str(node.hostname), node.port, timeout=60)
        self.addCleanup(browser.close)

        def ask(path: str) -> tuple[int, bytes]:
            browser.request("GET", path, headers={"Host": parts.netloc})
            answer = browser.getresponse()
            return answer.status, answer.read()

        expected = self.sandbox.exec("cat /etc/hostname").stdout_bytes
        self.assertEqual(ask(f"/hostname?{parts.query}"), (200, expected))
        if link.expires_at is not None:
            self.assertEqual(ask("/hostname")[0], 401)
        with self.assertRaisesRegex(keiki.BadRequestError, "port"):
            self.sandbox.preview(70000)

    def test_memory_is_counted(self) -> None:
        memory = self.sandbox.refresh().memory
        assert memory is not None
        self.assertEqual(memory.guest_bytes, self.sandbox.memory_mb << 20)
        self.assertGreater(memory.private_bytes, 1 << 16)
        self.assertGreaterEqual(memory.rss_bytes, memory.private_bytes)
        self.assertGreaterEqual(memory.pss_bytes, memory.private_bytes)
        self.sandbox.exec("head -c 32M /dev/urandom >/dev/shm/full", check=True)
        grown = self.sandbox.refresh().memory
        self.sandbox.filesystem.remove("/dev/shm/full")
        assert grown is not None
        self.assertGreater(grown.private_bytes - memory.private_bytes, 24 << 20)
        listed = {one.id: one.memory for one in Sandbox.list(memory=True)}
        self.assertIsNotNone(listed[self.sandbox.id])
        self.assertIsNone({one.id: one.memory for one in Sandbox.list()}[self.sandbox.id])


class Secrets(LiveTest):
    SHOW = "cd /run/keiki/secrets && for f in *; do echo $f=$(cat $f); done"

    def held(self, sandbox: Sandbox) -> list[str]:
        return sandbox.exec(self.SHOW, check=True).stdout.split()

    def test_they_follow_their_fate(self) -> None:
        given = {
            "stays": keiki.Secret("1", on_restore="inherit"),
            "goes": keiki.Secret("2", on_fork="drop"),
            "new": keiki.Secret("3", on_fork="replace", owner="nobody"),
        }
        parent = self.keep(Sandbox.create("base", ttl_seconds=600, secrets=given))
        self.assertEqual(self.held(parent), ["goes=2", "new=3", "stays=1"])
        self.assertEqual(
            parent.exec("cat /run/keiki/secrets/new /run/keiki/secrets/stays; true", user="nobody").stdout,
            "3",
        )
        with self.assertRaisesRegex(keiki.BadRequestError, "new"):
            self.keep(parent.fork())
        child = self.keep(parent.fork(secrets={"new": "4", "more": "5"}))
        self.assertEqual(self.held(child), ["more=5", "new=4", "stays=1"])
        snapshot = self.keep_snapshot(parent.snapshot())
        restored = self.keep(snapshot.restore(ttl_seconds=90, secrets={"more": "6"}))
        self.assertEqual(self.held(restored), ["more=6", "stays=1"])
        with self.assertRaisesRegex(keiki.BadRequestError, "on_fork"):
            self.keep(Sandbox.create("base", secrets={"x": keiki.Secret("1", on_fork="keep")}))


class Life(LiveTest):
    def test_pause_hibernate_and_back(self) -> None:
        with Sandbox.create(template="base", ttl_seconds=600) as sandbox:
            primed = self.start_holder(sandbox)
            sandbox.pause()
            self.assertEqual(sandbox.status, "paused")
            with self.assertRaises(keiki.ConflictError):
                sandbox.exec("true")
            sandbox.resume()
            self.assertEqual(sandbox.status, "running")
            sandbox.hibernate()
            self.assertEqual(sandbox.status, "hibernated")
            sandbox.wake()
            self.assertEqual(self.ask(sandbox)[:3], primed[:3])
            sandbox.hibernate()
            self.assertEqual(self.ask(sandbox)[:3], primed[:3], "exec wakes it")
            self.assertEqual(sandbox.refresh().status, "running")

    def test_lifecycle_list_and_logs(self) -> None:
        with Sandbox.create(template="base", ttl_seconds=600, metadata={"k": "v"}) as sandbox:
            self.assertEqual(sandbox.lifecycle().ttl_seconds, 600)
            self.assertEqual(sandbox.set_ttl(500).ttl_seconds, 500)
            self.assertTrue(sandbox.set_persistent(True).persistent)
            self.assertFalse(sandbox.set_persistent(False).persistent)
            self.assertIn(sandbox.id, [other.id for other in Sandbox.list()])
            same = Sandbox.get(sandbox.id)
            self.assertEqual((same.metadata, same.ttl_seconds, same.status), ({"k": "v"}, 500, "running"))
            self.assertIsInstance(sandbox.logs(), str)
        with self.assertRaises(keiki.NotFoundError):
            sandbox.exec("true")

    def test_events_tell_what_happened(self) -> None:
        with Sandbox.create(template="base", ttl_seconds=600) as sandbox:
            child = self.keep(sandbox.fork())
            sandbox.pause()
            sandbox.resume()
            kinds = [event.kind for event in sandbox.events()]
            for kind in ("created", "running", "frozen", "forked", "paused", "resumed"):
                self.assertIn(kind, kinds)
            [forked] = [event for event in sandbox.events() if event.kind == "forked"]
            self.assertEqual(forked.children, (child.id,))
            with sandbox.events_stream(since=forked.seq) as events:
                self.assertEqual([next(events).kind, next(events).kind], ["paused", "resumed"])
                sandbox.kill()
                self.assertEqual([event.kind for event in events], ["deleted"])

    def test_fork_many_at_once(self) -> None:
        parent = self.keep(Sandbox.create(template="base", ttl_seconds=600))
        self.start_holder(parent)
        children = [self.keep(child) for child in parent.fork(count=3, ttl_seconds=90)]
        self.assertEqual([self.ask(child)[3] for child in children], ["2", "2", "2"])
        self.assertEqual({child.ttl_seconds for child in children}, {90})
        generations = {child.generation for child in children} | {parent.generation}
        self.assertEqual(len(generations), 4)
        names = {child.exec("hostname; head -c 16 /dev/urandom | od -An -tx1").stdout for child in children}
        self.assertEqual(len(names), 3)

    def test_snapshot_listed_and_deleted(self) -> None:
        sandbox = self.keep(Sandbox.create(template="base", ttl_seconds=600))
        snapshot = self.keep_snapshot(sandbox.snapshot())
        self.assertEqual([other.id for other in Snapshot.list(sandbox_id=sandbox.id)], [snapshot.id])
        self.assertEqual(Snapshot.get(snapshot.id).sandbox_id, sandbox.id)
        child = self.keep(snapshot.restore(ttl_seconds=90))
        snapshot.delete()
        with self.assertRaises(keiki.NotFoundError):
            Snapshot.get(snapshot.id)
        self.assertEqual(child.exec("echo lives").stdout, "lives\n")


if __name__ == "__main__":
    unittest.main()
