"""gopt: shard a training step on disk, prove the ranks equal to it, and look at every step of the way.

Verbs, as on the command line. They take paths or what other verbs return, and a mesh as ``"dp=2,shard=4"``, a number
of ranks, or a ``Mesh``.

    load      read a training step and recover its roles
    shard     make every rank of a mesh
    split     share a step out between trainers and servers
    prove     prove ranks equal to their source, for all values, without running them
    check_certificate  follow a certificate of prove line by line, without the prover
    verify    run ranks and source, and compare them
    run       train, ranks as threads of this process
    inspect   describe a step, an output folder, a checkpoint or another file
    explain   show what became of one name
    report    write one HTML page of an output folder
    diff      compare two models, output folders or checkpoints
    plan      compare meshes, stages, partitions and bucket sizes
    calibrate  fit the figures of a device to a trace, for plan
    merge     write one model from ranks
    provenance         tell the file and the bytes behind each state
    save_state_dict    write what PyTorch's load_state_dict takes
    reshard   make other ranks from a folder or a checkpoint
    seal      take the files of a folder as they are, after you have edited them
    unchecked      read folders in a with block without comparing their files with their digests
    export    write a training step of PyTorch as ONNX
    derive         write the training step of a forward ONNX model
    import_step    write ONNX Runtime's training artifacts as one step
    golden_update  write what gopt makes of models as short texts
    golden_check   compare those texts with what gopt makes now

``shard``, ``verify`` and ``run`` take their options as a record (``ShardOptions``, ``VerifyOptions``, ``RunOptions``)
or as keywords of its fields, ``split`` and ``derive`` as a record (``SplitOptions``, ``DeriveOptions``).

Errors are subclasses of ``GoptError``: ``InputError``, ``OptionError``, ``UnsupportedError``, ``RunError``.
A signal that ends gopt raises ``StoppedError``, which is no Exception.

>>> import gopt
>>> source = gopt.load("fixtures/mlp_adamw.onnx")
>>> sharded = gopt.shard(source, 3)
>>> report = sharded.write("mlp_adamw.ranks", force=True)
>>> gopt.verify("mlp_adamw.ranks").equal
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gopt.api import Sharded, ShardOptions, Source, Split, load, split
    from gopt.cli.golden_texts import golden_check, golden_update
    from gopt.errors import GoptError, InputError, InvariantError, OptionError, RunError, StoppedError, UnsupportedError
    from gopt.frontends.derive.options import DeriveOptions
    from gopt.parameter_server.options import SplitOptions
    from gopt.records.mesh import Mesh
    from gopt.verbs.calibrate import calibrate
    from gopt.verbs.derive import derive
    from gopt.verbs.export import export
    from gopt.verbs.folders import diff, explain, merge, provenance, reshard, save_state_dict
    from gopt.verbs.import_step import import_step
    from gopt.verbs.inspect import inspect
    from gopt.verbs.plan import Plan, plan
    from gopt.verbs.prove import check_certificate, prove
    from gopt.verbs.report import report
    from gopt.verbs.run import Run, run
    from gopt.verbs.run_options import RunOptions
    from gopt.verbs.shard import Auto, shard
    from gopt.verbs.verify import verify
    from gopt.verification.options import VerifyOptions

__version__ = "0.1.0"
__all__ = [
    "Auto", "DeriveOptions", "GoptError", "InputError", "InvariantError", "Mesh", "OptionError", "Plan", "Run",
    "RunError", "RunOptions", "ShardOptions", "Sharded", "Source", "Split", "SplitOptions", "StoppedError",
    "UnsupportedError", "VerifyOptions", "__version__", "calibrate", "check_certificate", "derive", "diff", "explain",
    "export", "golden_check", "golden_update", "import_step", "inspect", "load", "merge", "plan", "prove", "provenance",
    "report", "reshard", "run", "save_state_dict", "seal", "shard", "split", "unchecked", "verify",
]  # fmt: skip

_NAMES = {
    "gopt.api": ("ShardOptions", "Sharded", "Source", "Split", "load", "split"),
    "gopt.artifact.integrity": ("unchecked",),
    "gopt.cli.golden_texts": ("golden_check", "golden_update"),
    "gopt.errors": (
        "GoptError", "InputError", "InvariantError", "OptionError", "RunError", "StoppedError", "UnsupportedError",
    ),
    "gopt.frontends.derive.options": ("DeriveOptions",),
    "gopt.records.mesh": ("Mesh",),
    "gopt.parameter_server.options": ("SplitOptions",),
    "gopt.verbs.derive": ("derive",),
    "gopt.verbs.export": ("export",),
    "gopt.verbs.folders": ("diff", "explain", "merge", "provenance", "reshard", "save_state_dict", "seal"),
    "gopt.verbs.import_step": ("import_step",),
    "gopt.verbs.inspect": ("inspect",),
    "gopt.verbs.calibrate": ("calibrate",),
    "gopt.verbs.plan": ("Plan", "plan"),
    "gopt.verbs.prove": ("check_certificate", "prove"),
    "gopt.verbs.report": ("report",),
    "gopt.verbs.run": ("Run", "run"),
    "gopt.verbs.run_options": ("RunOptions",),
    "gopt.verbs.shard": ("Auto", "shard"),
    "gopt.verbs.verify": ("verify",),
    "gopt.verification.options": ("VerifyOptions",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    """The public names as well, for ``help(gopt)`` and completion."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load a verb on first use, so that ``import gopt`` and ``gopt --help`` stay quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'gopt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
