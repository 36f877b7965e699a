"""An agent's tree search: fork a running machine, try each move in a copy of it, keep the best
copies.

The world is a sliding puzzle in the memory of a process in the sandbox, and nowhere else. It cannot
be copied, saved or undone: only the whole machine can be forked. Instead of a model, the distance
of the tiles from their places judges each state.
"""

from __future__ import annotations

import time

from keiki import Sandbox

#: The world: reads a move, writes the state of the board.
WORLD = """\
import os
board = [1, 2, 3, 0, 5, 6, 4, 7, 8]
steps = {"up": -3, "down": 3, "left": -1, "right": 1}
for name in ("/run/ask", "/run/tell"):
    os.mkfifo(name)
def legal(move):
    at, to = board.index(0), board.index(0) + steps[move]
    return 0 <= to < 9 and (steps[move] % 3 == 0 or at // 3 == to // 3)
while True:
    with open("/run/ask") as ask:
        move = ask.read().strip()
    if move in steps and legal(move):
        at = board.index(0)
        to = at + steps[move]
        board[at], board[to] = board[to], board[at]
    away = sum(abs(n // 3 - (t - 1) // 3) + abs(n % 3 - (t - 1) % 3) for n, t in enumerate(board) if t)
    with open("/run/tell", "w") as tell:
        print(away, *filter(legal, steps), file=tell)
"""
#: Starts it in the background, and waits until it listens.
START = "setsid python3 /root/world.py </dev/null >/tmp/log 2>&1 & until [ -p /run/tell ]; do sleep 0.1; done"
MOST_ROUNDS = 8
#: Copies to continue from.
WIDTH = 2


def ask(sandbox: Sandbox, move: str) -> tuple[int, list[str]]:
    """Makes a move; returns the distance from the solution and the legal moves."""
    answer = sandbox.exec(f"echo {move} >/run/ask && cat /run/tell", timeout_seconds=60, check=True)
    away, *moves = answer.stdout.split()
    return int(away), moves


def main() -> None:
    begun = time.monotonic()
    root = Sandbox.create(ttl_seconds=600)
    living = {root.id: root}
    forked, fork_ms = 0, 0.0
    try:
        root.filesystem.write("/root/world.py", WORLD)
        root.exec(START, timeout_seconds=60, check=True)
        away, moves = ask(root, "look")
        best = [(away, root, moves, "")]
        for number in range(1, MOST_ROUNDS + 1):
            tried = []
            for _, parent, moves, path in best:
                asked = time.monotonic()
                children = parent.fork(count=len(moves))
                fork_ms += (time.monotonic() - asked) * 1000
                forked += len(children)
                living.update((child.id, child) for child in children)
                for child, move in zip(children, moves):
                    tried.append((*ask(child, move), child, f"{path} {move}"))
            tried.sort(key=lambda one: one[0])
            best = [(away, child, moves, path) for away, moves, child, path in tried[:WIDTH]]
            kept = {child.id for _, child, *_ in best}
            for lost in [key for key in living if key not in kept]:
                living.pop(lost).kill()
            print(f"round {number}: {len(tried)} moves tried, the best is {best[0][0]} away:{best[0][3]}")
            if best[0][0] == 0:
                break
        memory = best[0][1].refresh().memory
        own = f", {memory.private_bytes >> 20} of {memory.guest_bytes >> 20} MiB private" if memory else ""
        print(f"{forked} forks, {fork_ms / forked:.0f} ms each; the winner is {best[0][1].id}{own}")
        print(f"whole search: {time.monotonic() - begun:.1f} s")
        if best[0][0] != 0:
            raise SystemExit("tree_search: not solved")
    finally:
        for sandbox in living.values():
            sandbox.kill()
    print("tree_search: ok")


if __name__ == "__main__":
    main()
