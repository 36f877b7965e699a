"""What only the async client does: many things at once, streams that are left, tasks that are cancelled."""

from __future__ import annotations

import asyncio
import tempfile
import time
import unittest
import uuid
from collections.abc import Awaitable
from pathlib import Path

import keiki
from keiki import AsyncSandbox, AsyncSnapshot
from live import LiveTest

#: A command that is easy to find, and never ends by itself.
FOREVER = "echo begun; sleep {}"


class AsyncLive(LiveTest, unittest.IsolatedAsyncioTestCase):
    async def made(self, making: Awaitable[AsyncSandbox]) -> AsyncSandbox:
        """A sandbox that is gone after the test."""
        sandbox = await making
        self.addAsyncCleanup(self.kill, sandbox)
        return sandbox

    async def kill(self, sandbox: AsyncSandbox) -> None:
        try:
            await sandbox.kill()
        except keiki.NotFoundError:
            pass

    async def runs(self, sandbox: AsyncSandbox, seconds: int) -> bool:
        """Does a `sleep` of this many seconds run there?"""
        result = await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        return f"sleep {seconds} " in result.stdout

    async def gone(self, sandbox: AsyncSandbox, seconds: int) -> bool:
        """Does it end within ten seconds?"""
        for _ in range(50):
            if not await self.runs(sandbox, seconds):
                return True
            await asyncio.sleep(0.2)
        return False

    async def test_many_at_once(self) -> None:
        parent = await self.made(AsyncSandbox.create("base", ttl_seconds=600))
        await parent.filesystem.write("/app/goal", "common\n")
        children = await parent.fork(count=3)
        for child in children:
            self.addAsyncCleanup(self.kill, child)
        started = time.monotonic()
        line = "cat /app/goal; sleep 4; hostname"
        results = await asyncio.gather(*[child.exec(line, check=True) for child in children])
        self.assertLess(time.monotonic() - started, 10.0, "one after the other takes 12 s")
        said = [result.stdout.split() for result in results]
        self.assertEqual({words[0] for words in said}, {"common"})
        self.assertEqual(len({words[1] for words in said}), 3, "the children have names of their own")

    async def test_streams_are_read_as_they_come_and_end_where_they_are_left(self) -> None:
        async with await AsyncSandbox.create("base", ttl_seconds=600) as sandbox:
            async with sandbox.exec_stream(FOREVER.format(31415)) as events:
                first = await events.__anext__()
                self.assertEqual(first.text, "begun\n")
                self.assertTrue(await self.runs(sandbox, 31415))
            self.assertTrue(await self.gone(sandbox, 31415), "a command outlived its stream")

            seen: list[str] = []

            async def keep(piece: str) -> None:
                await asyncio.sleep(0)
                seen.append(piece)

            result = await sandbox.exec(
                "echo out; echo err >&2; exit 3", on_stdout=keep, on_stderr=seen.append
            )
            self.assertEqual((sorted(seen), result.exit_code), (["err\n", "out\n"], 3))
            data = bytes(range(256)) * 5000
            await sandbox.filesystem.write("/tmp/data", data)
            pieces = [piece async for piece in sandbox.filesystem.read_stream("/tmp/data")]
            self.assertEqual(b"".join(pieces), data)
            with tempfile.TemporaryDirectory() as scratch:
                Path(scratch, "tree").mkdir()
                Path(scratch, "tree", "f").write_bytes(data)
                await sandbox.filesystem.mkdir("/tmp/w")
                async with sandbox.filesystem.watch("/tmp/w") as changes:
                    self.assertEqual((await changes.__anext__()).kind, "ready")
                    await sandbox.filesystem.upload(Path(scratch, "tree"), "/tmp/w/tree")
                    self.assertEqual((await changes.__anext__()).is_dir, True)
                await sandbox.filesystem.download("/tmp/w", Path(scratch, "back"))
                self.assertEqual(Path(scratch, "back", "tree", "f").read_bytes(), data)
            async with sandbox.logs_stream() as lines:
                self.assertIsInstance(await asyncio.wait_for(lines.__anext__(), 20), str)

    async def test_a_cancelled_task_ends_its_command(self) -> None:
        async with await AsyncSandbox.create("base", ttl_seconds=600) as sandbox:
            task = asyncio.create_task(sandbox.exec(FOREVER.format(27182)))
            while not await self.runs(sandbox, 27182):
                await asyncio.sleep(0.1)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertTrue(await self.gone(sandbox, 27182), "a command outlived its task")
            with self.assertRaises(keiki.SandboxTimeout):
                await sandbox.exec("sleep 60", timeout_seconds=1)

    async def test_snapshots_and_names(self) -> None:
        key = str(uuid.uuid4())
        sandbox = await self.made(AsyncSandbox.create("base", ttl_seconds=600, idempotency_key=key))
        again = await AsyncSandbox.create("base", ttl_seconds=600, idempotency_key=key)
        self.assertEqual(again.id, sandbox.id)
        with self.assertRaises(keiki.IdempotencyError):
            await AsyncSandbox.create("base", ttl_seconds=601, idempotency_key=key)
        await sandbox.exec("echo kept >/dev/shm/x", check=True)
        snapshot = await sandbox.snapshot()
        await sandbox.kill()
        self.assertEqual((await AsyncSnapshot.get(snapshot.id)).sandbox_id, sandbox.id)
        try:
            restored = await self.made(snapshot.restore(ttl_seconds=120))
            self.assertEqual((await restored.exec("cat /dev/shm/x")).stdout, "kept\n")
        finally:
            await snapshot.delete()
        with self.assertRaises(keiki.ConflictError):
            await AsyncSandbox.create("base", ttl_seconds=600, idempotency_key=key)


if __name__ == "__main__":
    unittest.main()
