"""A code interpreter: every request gets its own machine, created for it and deleted after it.

A process in the template has imported the data stack and waits. A request runs in a fork of that
process, in a copy of that machine: it sees no other request, and does not wait for imports.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from keiki import Sandbox

TEMPLATE = "code-interpreter"

#: What users might send.
REQUESTS = {
    "statistics": "import pandas as pd; print(pd.Series([3, 1, 4, 1, 5]).describe()['mean'])",
    "regression": (
        "from sklearn.linear_model import LinearRegression as L\n"
        "print(L().fit([[0], [1], [2]], [1, 3, 5]).predict([[10]])[0].round(6))"
    ),
    "plot": (
        "import numpy as np, matplotlib.pyplot as plt\n"
        "x = np.linspace(0, 6, 100)\n"
        "plt.plot(x, np.sin(x)); plt.savefig('/tmp/plot.png')\n"
        "open('/tmp/left-behind', 'w').close()"
    ),
    "curious": "import os; print(os.path.exists('/tmp/left-behind'))",
    "wrong": "1 / 0",
}


def answer(code: str) -> tuple[str, bytes | None]:
    """Runs one request; returns its output, and its picture if it made one."""
    begun = time.monotonic()
    with Sandbox.create(TEMPLATE, ttl_seconds=120) as sandbox:
        made = time.monotonic()
        result = sandbox.exec(["warm-python", "-c", code], timeout_seconds=60)
        ran = time.monotonic()
        files = sandbox.filesystem
        picture = files.read("/tmp/plot.png") if files.exists("/tmp/plot.png") else None
        output = (result.stdout or result.stderr.strip().rpartition("\n")[2]).strip()
    print(f"  create {(made - begun) * 1000:.0f} ms, run {(ran - made) * 1000:.0f} ms: {output}")
    return output, picture


def main() -> None:
    answers = {}
    for name, code in REQUESTS.items():
        print(name)
        answers[name] = answer(code)
    with Sandbox.create(TEMPLATE, ttl_seconds=120) as sandbox:
        begun = time.monotonic()
        sandbox.exec(["python", "-c", REQUESTS["statistics"]], timeout_seconds=120, check=True)
        print(f"the first request with its own imports: {(time.monotonic() - begun) * 1000:.0f} ms")
    outputs = {name: output for name, (output, _) in answers.items()}
    expected = {
        "statistics": "2.8",
        "regression": "21.0",
        "plot": "",
        "curious": "False",
        "wrong": "ZeroDivisionError: division by zero",
    }
    if outputs != expected:
        raise SystemExit(f"code_interpreter: {outputs}")
    picture = answers["plot"][1] or b""
    if not picture.startswith(b"\x89PNG"):
        raise SystemExit("code_interpreter: no picture")
    path = Path(tempfile.mkdtemp(prefix="keiki-")) / "plot.png"
    path.write_bytes(picture)
    print(f"wrote {path}, {len(picture)} bytes")
    print("code_interpreter: ok")


if __name__ == "__main__":
    main()
