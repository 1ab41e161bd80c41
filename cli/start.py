"""The start of the installed command: an interrupt ends the command quietly during imports.

This module imports nothing but ``gc``, ``os``, ``signal`` and types. The handler is set before the imports of command
line and libraries; ``main`` then says "interrupted" itself.
"""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType
from typing import NoReturn

INTERRUPTED, FAILED = 130, 5
"""Exit codes after an interrupt, and without the memory even to end in order (contract section 3)."""
_COLLECT_AFTER = 100_000
"""New objects after which Python looks for garbage: imports make many, and keep them."""


def entry() -> None:
    """Run the command line of this process, and end the process."""
    gc.set_threshold(_COLLECT_AFTER)
    mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # an ignored one, as under nohup, stays so
    if mine:
        signal.signal(signal.SIGINT, _end)
    from .main import leave, main
    from .terminal import open_streams

    open_streams()
    try:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main()
        if mine:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:  # just before or after what main guards
        code = INTERRUPTED
    except MemoryError:
        _end_without_memory()
    leave(code)


def _end_without_memory() -> NoReturn:
    try:
        os.write(2, b"gopt: error: out of memory\n")
    finally:
        os._exit(FAILED)


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: what is being imported holds nothing needing an end, and prints no traceback."""
    os._exit(INTERRUPTED)
