"""Commands on a file system that is really full: a tmpfs in a namespace of its own, of every size until they succeed.

Runs under ``unshare -rm``; prints a line of JSON per case, as ``sweep.py`` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import Fault
from sweep import Sweep, adopt_orphans, scratch_folder, tree
from swept import CASES, warm

PAGE = 4096
_LARGE = "size=64m,nr_inodes=100000"


class SmallDisk(Sweep):
    """A case whose output is on a disk of its own."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.disk = scratch / "disk"
        self.disk.mkdir(exist_ok=True)
        _mount("-t", "tmpfs", "-o", _LARGE, "tmpfs", str(self.disk))
        super().__init__(CASES[name], scratch, self.disk / "work")

    def sized(self, room: int, what: str) -> int:
        """Run with room for so many more pages or inodes, and judge it; returns the exit code."""
        self._start()
        state = os.statvfs(self.disk)
        pages, files = state.f_blocks - state.f_bfree + room, sum(1 for _ in self.disk.rglob("*")) + 1 + room
        _mount(
            "-o", f"remount,size={pages * PAGE}" if what == "pages" else f"remount,nr_inodes={files}", str(self.disk)
        )
        done = self.run(self.case.command)
        _mount("-o", f"remount,{_LARGE}", str(self.disk))
        left = tree(self.work)
        wrong = (
            self._ended(Fault.FULL, done) + self._litter(left, Fault.FULL, "") + self._state(left) + self._next(left)
        )
        if done.code == 0 and left != self.new:
            wrong.append("it claims to be done")
        self.found.points[what] += 1
        self.found.faults += [f"{self.case.name}: {room} {what}: {each} [{done.said[-300:]}]" for each in wrong]
        return done.code

    def close(self) -> None:
        subprocess.run(["umount", str(self.disk)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    warm()
    adopt_orphans()
    scratch = scratch_folder()
    for name in sys.argv[1:] or CASES:
        disk = SmallDisk(name, scratch)
        for what in ("pages", "inodes"):
            room = 0
            while disk.sized(room, what) and room < 1000:
                room += 1
        print(json.dumps({"case": name, "faults": dict(disk.found.points), "broken": disk.found.faults}), flush=True)
        disk.close()


if __name__ == "__main__":
    main()
