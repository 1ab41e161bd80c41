"""Runs a command of gopt while another process, as it were, truncates a file: ``python truncated.py FILE AT COMMAND…``.

AT is the number of an audit event, counted from the first time that FILE is opened; 0: never. What is printed at the
end is the number of events, and those at which FILE was opened.
"""

from __future__ import annotations

import os
import sys

KEPT = 100
"""Bytes that stay."""


def main() -> int:
    """The exit code of the command."""
    path, at = os.path.realpath(sys.argv[1]), int(sys.argv[2])
    from gopt.cli.main import main as command

    seen, opened = 0, list[int]()

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "open" and isinstance(args[0], str) and os.path.realpath(args[0]) == path:
            opened.append(seen + 1)
        if not opened:
            return
        seen += 1
        if seen == at:
            os.truncate(path, KEPT)

    sys.addaudithook(hook)
    code = command(sys.argv[3:])
    print(f"\nevents {seen} opened {opened}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
