"""Random numbers of a process's own begin anew in each copy of the machine.

A copy goes on with the memory of its original, and so with the state of every generator that a process keeps. Keiki
sends SIGURG to all processes of a copy before any of them goes on. Here that seeds `random`, numpy's global generator
and OpenSSL from the kernel, in the main thread and before its next instruction. A program that handles SIGURG itself
has its own handler instead.

Generators that a program made for itself are the program's: `on_copy(function)` has it called at that moment too.
"""

import _signal
import sys

_functions = []


def on_copy(function):
    """Has function() called in the main thread in each copy; returns it, so it may be used as a decorator."""
    _functions.append(function)
    return function


def _numpy():
    numpy = sys.modules["numpy.random"]
    lock = sys.modules["numpy.random.mtrand"]._rand._bit_generator.lock
    if lock.acquire(False):
        lock.release()
        numpy.seed()
    else:
        # Another thread's, or of the very call that this interrupted: to wait for it here could be for ever.
        import threading

        threading.Thread(target=numpy.seed, daemon=True).start()


def _openssl():
    import os

    # All its generators, of all threads, seed themselves from this one before they are drawn from again.
    sys.modules["_ssl"].RAND_add(os.urandom(32), 32.0)


def _begin_anew(*_):
    # What is not imported yet will be seeded when it is.
    known = (("random", lambda: sys.modules["random"].seed()), ("numpy.random", _numpy), ("_ssl", _openssl))
    for function in [function for name, function in known if name in sys.modules] + _functions:
        try:
            function()
        except Exception:
            # One that fails keeps no other from it, nor the program from going on.
            sys.excepthook(*sys.exc_info())


try:
    _signal.signal(_signal.SIGURG, _begin_anew)
except ValueError:
    # An interpreter within another, or a thread that is not the first: signals are not its.
    pass
