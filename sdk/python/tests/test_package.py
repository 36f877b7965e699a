"""What is published: the twins are current, the types hold, and the wheel works where nothing else is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import textwrap
import unittest
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
NEEDS_MYPY = unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")


def run(*command: str | Path, cwd: Path = HERE) -> str:
    """The output of a program that must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


class Twins(unittest.TestCase):
    def test_the_blocking_client_is_what_is_made_of_the_async_one(self) -> None:
        run(sys.executable, "unasync.py", "--check")

    def test_nothing_async_is_left_in_it(self) -> None:
        for source in (HERE / "src" / "keiki" / "_async").glob("*.py"):
            if source.name != "__init__.py":
                text = (HERE / "src" / "keiki" / source.name).read_text().partition("\n")[2]
                for word in ("async", "await", "aclose", "__a"):
                    self.assertNotIn(word, text, source.name)

    @NEEDS_MYPY
    def test_types(self) -> None:
        run(sys.executable, "-m", "mypy")


#: What a user's type checker makes of a use of the package; the marked lines are errors.
TYPED = """\
import asyncio
from keiki import AsyncSandbox, ExecResult, Sandbox

def blocking() -> ExecResult:
    with Sandbox.create("base") as sandbox:
        one: Sandbox = sandbox.fork()
        many: list[Sandbox] = sandbox.fork(count=2)
        wrong: Sandbox = sandbox.fork(count=2)  # wrong
        codes: list[int] = [event.exit_code for event in one.exec_stream("true")]
        print(many, codes, wrong)
        return sandbox.exec("true")

async def main() -> ExecResult:
    async with await AsyncSandbox.create("base") as sandbox:
        one: AsyncSandbox = await sandbox.fork()
        forgotten: ExecResult = one.exec("true")  # wrong
        async for event in sandbox.exec_stream("true"):
            print(event.text, forgotten)
        return await one.exec("true")

blocking()
asyncio.run(main())
"""


class Wheel(unittest.TestCase):
    """Built once, installed into an environment that has nothing else."""

    @classmethod
    def setUpClass(cls) -> None:
        # Written by a build beside the sources: not here.
        made = tempfile.TemporaryDirectory(prefix="keiki-wheel-")
        cls.addClassCleanup(made.cleanup)
        cls.dir = Path(made.name)
        source = cls.dir / "source"
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "src"):
            run("cp", "-r", HERE / name, source / name)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", cls.dir, source)
        [cls.wheel] = cls.dir.glob("*.whl")
        run(sys.executable, "-m", "venv", cls.dir / "venv")
        cls.python = cls.dir / "venv" / "bin" / "python"
        run(cls.python, "-m", "pip", "install", "-q", "--no-index", cls.wheel)

    def test_it_holds_the_package_and_nothing_else(self) -> None:
        names = zipfile.ZipFile(self.wheel).namelist()
        modules = {f"keiki/{path.relative_to(HERE / 'src' / 'keiki')}" for path in self._sources()}
        package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
        self.assertEqual(package, modules | {"keiki/py.typed"})
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        said = zipfile.ZipFile(self.wheel).read(metadata).decode()
        for line in ("Name: keiki", "Requires-Python: >=3.9", "Provides-Extra: async"):
            self.assertIn(line + "\n", said)
        needed = [line for line in said.splitlines() if line.startswith("Requires-Dist")]
        self.assertTrue(all("extra ==" in line for line in needed), needed)

    def test_the_blocking_client_needs_nothing(self) -> None:
        program = """\
            import keiki
            assert keiki.__version__ == "%s", keiki.__version__
            try:
                keiki.Sandbox.list(client=keiki.Client("http://127.0.0.1:1"))
            except keiki.ConnectionError as error:
                print(error)
            try:
                keiki.AsyncClient("http://127.0.0.1:1")
            except ImportError as error:
                print(error)
            """
        import keiki

        program = textwrap.dedent(program) % keiki.__version__
        said = run(self.python, "-W", "error", "-c", program, cwd=self.dir).splitlines()
        self.assertIn("cannot connect to the node at 127.0.0.1:1", said[0])
        self.assertEqual(said[1], "the async client needs httpx: pip install 'keiki[async]'")

    @NEEDS_MYPY
    def test_its_types_reach_the_user(self) -> None:
        program = self.dir / "program.py"
        program.write_text(TYPED)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(self.python)]
        command += ["--cache-dir", str(self.dir / "cache"), "--config-file", "/dev/null", str(program)]
        checked = subprocess.run(command, cwd=self.dir, capture_output=True, text=True)
        wrong = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
        marked = {at for at, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# wrong")}
        self.assertEqual(wrong, marked, checked.stdout + checked.stderr)

    def _sources(self) -> list[Path]:
        return [path for path in (HERE / "src" / "keiki").rglob("*.py") if "__pycache__" not in path.parts]


if __name__ == "__main__":
    unittest.main()
