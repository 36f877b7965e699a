"""Generates the blocking client from the async one: ``python unasync.py`` writes it, ``--check``
compares.

The modules of ``src/keiki/_async`` are the source. Removing ``async`` and ``await`` and renaming
classes gives the modules of the same names in ``src/keiki``. Only HTTP differs in more than that,
and is written twice: ``_http.py`` and ``_http_async.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "src" / "keiki"
SOURCE = PACKAGE / "_async"

HEAD = "# Generated from _async/{name} by unasync.py. Do not edit.\n"

#: Applied in this order.
RULES = [
    (r"AsyncGenerator\[([^\[\]]+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(?=(Client|Command|Sandbox|Snapshot|Filesystem|Stream)\b)", ""),
    (r"\bdefault_async_client\b", "default_client"),
    (r"\b_http_async\b", "_http"),
    (r"\basync (?=(def|with|for)\b)", ""),
    (r"\bawait ", ""),
    (r"__a(?=(enter|exit|iter|next)__)", "__"),
    (r"\baclose\b", "close"),
    (r"\bfrom \.\.", "from ."),
]


def blocking(name: str) -> str:
    """The blocking version of a module."""
    text = (SOURCE / name).read_text()
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return HEAD.format(name=name) + text


def modules() -> list[str]:
    """Names of the generated modules."""
    return sorted(path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py")


def main() -> int:
    """Writes the modules, or with ``--check`` lists those that are not current."""
    stale = [name for name in modules() if not _is_current(name)]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"src/keiki/{name} does not match src/keiki/_async/{name}: run unasync.py")
        return 1 if stale else 0
    for name in stale:
        (PACKAGE / name).write_text(blocking(name))
    return 0


def _is_current(name: str) -> bool:
    path = PACKAGE / name
    return path.is_file() and path.read_text() == blocking(name)


if __name__ == "__main__":
    sys.exit(main())
