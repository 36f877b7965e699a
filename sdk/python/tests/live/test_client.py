"""Each call of the package once, in a real guest."""

from __future__ import annotations

import io
import time
import unittest

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

    def test_wrong_requests_name_the_field(self) -> None:
        with self.assertRaisesRegex(keiki.BadRequestError, "ttl_seconds"):
            self.keep(Sandbox.create(ttl_seconds=0))
        with self.assertRaises(keiki.NotFoundError):
            self.keep(Sandbox.create(template="no-such-template"))


if __name__ == "__main__":
    unittest.main()
