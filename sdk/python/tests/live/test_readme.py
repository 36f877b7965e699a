"""The examples of the README, each run as it stands. A block of text after one is what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from live import LiveTest

HERE = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Readme(LiveTest):
    def test_every_example_runs(self) -> None:
        examples = BLOCK.findall((HERE / "README.md").read_text())
        self.assertGreaterEqual(len(examples), 5)
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        for number, (program, expected) in enumerate(examples):
            with self.subTest(example=number, begins=program.splitlines()[0]):
                command = [sys.executable, "-W", "error", "-c", program]
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
                self.assertEqual(done.returncode, 0, f"{program}\n{done.stderr}")
                if expected:
                    self.assertEqual(done.stdout, expected, program)
