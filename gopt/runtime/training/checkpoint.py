"""Checkpoints: one safetensors file per rank and an index written last, in a folder that is named when it is whole.

A crash at any moment leaves the checkpoints before it as they were. Beside the steps lie manifest, report and source,
so that ``gopt merge`` and ``gopt reshard`` need nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gopt.documents import MANIFEST, as_run, read_json
from gopt.errors import InputError, OptionError, RunError
from gopt.graph.external import SAFETENSORS, load_state
from gopt.graph.load import load
from gopt.runtime.engines.base import Engine
from gopt.runtime.session import Array, array_dtype
from gopt.seal import FORMAT, INDEX, STEP, check_file, digest, rank_name, read_index, step_name, whole_steps
from gopt.write import INLINE, Values, model_bytes

_CODES = {dtype: code for code, dtype in SAFETENSORS.items()}


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one job: ``home`` holds them, ``folder`` is what the job runs, ``keep`` of them stay."""

    home: Path
    folder: Path
    manifest: Mapping[str, Any]
    keep: int = 2

    def check(self, resume: bool) -> None:
        """Raise OptionError for a place in which this run has no business."""
        if self.home.resolve() == self.folder.resolve():
            raise OptionError(f"--checkpoint {self.home} is the folder that runs", "choose another one")
        if (self.home / INDEX).is_file():
            raise OptionError(
                f"--checkpoint {self.home} is a checkpoint itself", f"give what holds it: {self.home.parent}"
            )
        if not resume and (kept := self.steps()):
            raise OptionError(
                f"{self.home} holds checkpoints of an earlier run, up to step {kept[-1]}",
                "go on from there with --resume, or choose another --checkpoint",
            )

    def open(self) -> None:
        """Put manifest, report and source in place, on the first rank, and see that steps can be written beside them.

        Raises RunError when another job's lie there, and where nothing can be written.
        """
        mine = digest(self.manifest)
        kept = self.home / "manifest.json"
        try:
            other = kept.is_file() and digest(read_json(kept, MANIFEST)) != mine
        except InputError as error:
            raise as_run(error) from error
        if other:
            raise RunError(
                f"{self.home} holds checkpoints of other ranks", "choose another --checkpoint, or use gopt reshard"
            )
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            graph = load(self.folder / "source.onnx", own=True)
            values = Values()
            for name, tensor in graph.initializers.items():
                if tensor.nbytes > INLINE:
                    values.add([(name, tensor)])
            values.write(self.home / "source.bin")
            (self.home / "source.onnx").write_bytes(model_bytes(graph, values.offset, "source.bin", {}))
            for name in ("report.json", "manifest.json"):
                shutil.copyfile(self.folder / name, self.home / name)
        except OSError as error:
            raise _unwritable(self.home, error, "nothing was trained yet: choose another --checkpoint") from error
        for path in self.home.iterdir():
            if STEP.fullmatch(path.name) and not path.is_dir():
                raise RunError(f"cannot write checkpoints into {self.home}: {path.name} is a file", "move it away")

    def steps(self) -> list[int]:
        """Steps of which there is a whole checkpoint, in order."""
        return whole_steps(self.home)

    def path(self, step: int) -> Path:
        return self.home / step_name(step)

    def save(self, engine: Engine, step: int, held: Mapping[str, Any], down: Callable[[Any], Array]) -> None:
        """Write a checkpoint; every rank calls it. ``down`` gives a state's array in host memory.

        Raises RunError when it cannot be written.
        """
        draft = self.home / f".{step_name(step)}.tmp"
        if engine.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            _guarded(draft, draft.mkdir)
        engine.gather(None)
        name = rank_name(engine.rank)
        mine = {state: down(held[state]) for state in self._written_by(engine.rank)}
        entry = _guarded(draft / name, lambda: _write(draft / name, mine))
        entries = engine.gather((name, entry))
        if engine.rank == 0:
            index = {
                "format": FORMAT, "step": step, "manifest": digest(self.manifest), "files": dict(entries),
            }  # fmt: skip
            _guarded(draft / INDEX, lambda: self._finish(draft, step, index))
        engine.gather(None)

    def _finish(self, draft: Path, step: int, index: Mapping[str, Any]) -> None:
        with (draft / INDEX).open("w", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        target = self.path(step)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        _sync_folder(self.home)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def load(self, rank: int, step: int) -> dict[str, Array]:
        """The states of one rank as they were saved; sizes and digests of the files it reads are checked first.

        Raises RunError for a checkpoint of other ranks, or one that is damaged.
        """
        folder = self.path(step)
        files = read_index(folder, self.manifest)
        found: dict[str, Array] = {}
        for writer, names in self._writers(rank).items():
            path = folder / rank_name(writer)
            check_file(path, files.get(path.name))
            try:
                tensors = load_state(path)
                found.update({name: np.array(tensors[name].numpy()) for name in names})
            except (InputError, KeyError) as error:
                raise RunError(f"checkpoint {path} is damaged: {error}") from error
        return found

    def _writers(self, rank: int) -> dict[int, list[str]]:
        """For every state of a rank, the first rank that holds the very same: it writes for all of them."""
        owner: dict[str, int] = {}
        for other in self.manifest["ranks"]:
            for state in other["state"]:
                owner.setdefault(_key(state), other["rank"])
        found: dict[int, list[str]] = {}
        for state in self.manifest["common"]["state"]:
            first = rank if state.get("local") else 0
            found.setdefault(first, []).append(state["input"])
        for state in self.manifest["ranks"][rank]["state"]:
            found.setdefault(owner[_key(state)], []).append(state["input"])
        return found

    def _written_by(self, rank: int) -> list[str]:
        return self._writers(rank).get(rank, [])


def _key(state: Mapping[str, Any]) -> str:
    return json.dumps([state["input"], state["pieces"]])


def _write(path: Path, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """A safetensors file: length of the header, header, tensors. Returns its size and digest."""
    header: dict[str, Any] = {}
    place = 0
    for name, array in arrays.items():
        code = _CODES[array_dtype(array)]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    seen = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *map(_bytes, arrays.values())):
            seen.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": seen.hexdigest()}


def _bytes(array: Array) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _guarded(path: Path, work: Callable[[], Any]) -> Any:
    """Do some writing; what it leaves of a file that cannot be finished is removed."""
    try:
        return work()
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError, hint: str = "the checkpoints before it are whole") -> RunError:
    what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
    return RunError(f"cannot write checkpoint {path}: {what}", hint)


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
