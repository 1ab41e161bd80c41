"""A drawn setting through ``gopt shard``, ``gopt prove``, its certificate and ``gopt verify``."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from draws import Verdict
from onnx import checker, shape_inference
from wild_gen.table import Unfit

import gopt
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.verification.proof.result import ProofVerdict
from option_gen.beside import beside
from option_gen.make import Setting

STEPS = 2


def judge(setting: Setting, folder: Path) -> Verdict:
    """``right``; ``refused``; ``unproven``, where the proof does not close; ``unconfirmed``, where a gradient does not
    follow the batch; ``WRONG`` and ``CRASH`` are faults. Of a step in other forms also ``unfit``, where it cannot be
    written so, and what ``beside`` says."""
    try:
        if not setting.forms:
            return _judged(setting, folder)
        checker.check_model(str(setting.file(folder)), full_check=True)
        return beside(setting, _judged(setting, folder), folder)
    except (Unfit, checker.ValidationError, shape_inference.InferenceError) as error:
        return Verdict("unfit", str(error))
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-3))


def _judged(setting: Setting, folder: Path) -> Verdict:
    try:
        gopt.shard(setting.file(folder), setting.mesh, **setting.options(folder)).write(folder / "ranks")
    except (InputError, OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    return of_ranks(folder)


def of_ranks(folder: Path) -> Verdict:
    """What is found of the ranks in a folder."""
    found = gopt.verify(folder / "ranks", steps=STEPS, confirm=False)
    if not found.equal:
        unseen = "is not confirmed" in found.reason()
        return Verdict("unconfirmed" if unseen else "WRONG", found.reason())
    proof = json.loads((folder / "ranks" / "report.json").read_text())["proof"]
    if proof["verdict"] != ProofVerdict.PROVEN.value:
        return Verdict("unproven", f"{proof['reason']}: {', '.join(proof['open'])}")
    try:
        if not gopt.prove(folder / "ranks", certificate=folder / "certificate").proven:
            return Verdict("unproven", "with all nodes that ranks have from the source")
    except UnsupportedError:
        return Verdict("right", "no certificate")
    checked = gopt.check_certificate(folder / "certificate", folder / "ranks")
    return Verdict("WRONG" if checked.fault else "right", checked.reason())
