"""The four ways in which programs use sandboxes, each as a whole program.

A fresh sandbox for each request; one warm parent with many branches of which the good ones stay; a snapshot
as a save point beside live forks; and a snapshot that outlives its parent and becomes many workers.
"""

from __future__ import annotations

import unittest

import keiki
from keiki import Sandbox
from live import LiveTest

#: A repository with a failing test, and four ways to mend it of which two are right.
CLAMP = "def clamp(value, low, high):\n    return min(value, high)\n"
CHECK = (
    "from clamp import clamp\n"
    "assert clamp(5, 0, 3) == 3\n"
    "assert clamp(-5, 0, 3) == 0, 'below the range'\n"
    "print('all good')\n"
)
PATCHES = {
    "swap": "sed -i 's/min(value, high)/max(value, low)/' clamp.py",
    "nest": "sed -i 's/min(value, high)/max(low, min(value, high))/' clamp.py",
    "none": "true",
    "sort": "sed -i 's/min(value, high)/sorted((low, value, high))[1]/' clamp.py",
}

#: A request that leaves a trace and tells whether another left one before.
TRACE = """\
import os
seen = os.path.exists("/tmp/trace")
open("/tmp/trace", "w").close()
print("seen", seen)
"""


class FreshForEachRequest(LiveTest):
    def run_once(self, code: str) -> str:
        sandbox = self.keep(Sandbox.create(template="base", ttl_seconds=120))
        try:
            sandbox.filesystem.write("/app/main.py", code)
            result = sandbox.exec("cd /app && python main.py", timeout_seconds=30)
            return result.stdout if result.exit_code == 0 else result.stderr
        finally:
            sandbox.kill()

    def test_no_request_sees_another(self) -> None:
        self.assertEqual(self.run_once(TRACE), "seen False\n")
        self.assertEqual(self.run_once(TRACE), "seen False\n")
        self.assertIn("ZeroDivisionError", self.run_once("1 / 0"))


class WarmOnceThenBranch(LiveTest):
    def test_passing_branches_stay_the_others_go(self) -> None:
        # The expensive part, once.
        parent = self.keep(Sandbox.create(template="base", ttl_seconds=3600))
        setup = "git init -q /app && cd /app && git config user.email a@b.c && git config user.name a"
        parent.exec(setup, check=True)
        parent.filesystem.write("/app/clamp.py", CLAMP)
        parent.filesystem.write("/app/check.py", CHECK)
        parent.exec("cd /app && git add . && git commit -qm start && python -m compileall -q .", check=True)
        parent.filesystem.write("/app/goal.md", "make the failing check pass\n")
        self.assertNotEqual(parent.exec("cd /app && python check.py").exit_code, 0)

        winners: dict[str, Sandbox] = {}
        for name, patch in PATCHES.items():
            child = self.keep(parent.fork())
            child.exec(f"cd /app && {patch}", check=True)
            result = child.exec("cd /app && python check.py", timeout_seconds=300)
            if result.exit_code == 0:
                winners[name] = child
            else:
                child.kill()
        self.assertEqual(sorted(winners), ["nest", "sort"])

        # The parent saw none of it; the winners outlive it, each with its own change and the common goal.
        self.assertEqual(parent.exec("cd /app && git diff --stat").stdout, "")
        parent.kill()
        diffs = {child.exec("cd /app && git diff", check=True).stdout for child in winners.values()}
        self.assertEqual(len(diffs), len(winners))
        for child in winners.values():
            self.assertEqual(child.filesystem.read_text("/app/goal.md"), "make the failing check pass\n")


class SavePointBesideForks(LiveTest):
    def test_branches_share_the_past_only(self) -> None:
        parent = self.keep(Sandbox.create(template="base", persistent=True))
        primed = self.start_holder(parent)
        parent.filesystem.write("/app/plan.md", "try both sides\n")

        save_point = self.keep_snapshot(parent.snapshot())
        branches = [self.keep(parent.fork()) for _ in range(4)]
        try:
            for number, child in enumerate(branches):
                child.filesystem.write("/app/branch", str(number))
                answers = [self.ask(child, f"--branch={number}") for _ in range(number + 1)]
                # The same fixtures, made once; a count of its own that went on from the parent's.
                self.assertEqual(answers[-1][:3], primed[:3])
                self.assertEqual(answers[-1][3:], [str(1 + number + 1), f"--branch={number}"])
            for number, child in enumerate(branches):
                self.assertEqual(child.filesystem.read_text("/app/branch"), str(number))
                self.assertEqual(child.filesystem.read_text("/app/plan.md"), "try both sides\n")
                self.assertEqual(child.parent_sandbox_id, parent.id)
            self.assertFalse(parent.filesystem.exists("/app/branch"))
            self.assertEqual(self.ask(parent)[3], "2")
        finally:
            for child in branches:
                child.kill()
            parent.kill()

        # The save point is of before all that.
        restored = self.keep(save_point.restore(ttl_seconds=120))
        self.assertEqual(self.ask(restored), [*primed[:3], "2"])
        self.assertFalse(restored.filesystem.exists("/app/branch"))
        self.assertEqual(restored.from_snapshot, save_point.id)


class SnapshotOutlivesItsParent(LiveTest):
    def test_eight_workers_from_one_warm_import(self) -> None:
        parent = self.keep(Sandbox.create(template="base", ttl_seconds=1800))
        parent.filesystem.write("/app/lib/heavy.py", "import json, decimal\n__version__ = '1.2'\n")
        parent.exec("cd /app/lib && python -m compileall -q .", timeout_seconds=300, check=True)
        command = "PYTHONPATH=/app/lib python -c 'import heavy; print(heavy.__version__)'"
        parent.exec(command, check=True)
        primed = self.start_holder(parent)

        snapshot = self.keep_snapshot(parent.snapshot())
        parent.kill()
        with self.assertRaises(keiki.NotFoundError):
            parent.exec("true")

        workers = [self.keep(snapshot.fork(ttl_seconds=300)) for _ in range(8)]
        self.assertEqual(len({worker.id for worker in workers}), 8)
        for worker in workers:
            self.assertEqual(worker.exec(command).stdout, "1.2\n")
            # Nothing was loaded again: the process that loaded it goes on in every worker.
            self.assertEqual(self.ask(worker), [*primed[:3], "2"])
            self.assertEqual(worker.ttl_seconds, 300)
            worker.kill()


if __name__ == "__main__":
    unittest.main()
