"""Chains of operators, one after the other: ``cd tests && python -m engine_gen --seed 1 --minutes 5``.

Run it with each new version of onnxruntime: a rewrite that it finds goes into ``WRONG`` in ``gopt/runtime/session.py``.
``--with NAME`` leaves one of those on that are off, which it is to find.
"""

from __future__ import annotations

import sys

import draws

from engine_gen.chains import chain
from engine_gen.judge import judge
from gopt.runtime import session


def one(seed: int) -> draws.Case:
    model, feeds, told = chain(seed)
    return draws.Case.of(seed, f"{seed}: opset {model.opset_import[0].version}: {told}", judge(model, feeds))


def main(arguments: list[str] | None = None) -> int:
    parser = draws.parser("engine_gen", __doc__)
    parser.add_argument("--with", dest="on", action="append", default=[], help="a rewrite that is on after all")
    options = parser.parse_args(arguments)
    session.WRONG = session.WRONG - set(options.on)
    wrong = ("rewritten", "kernel").__contains__
    return draws.run(draws.of_seeds(options, one), options.minutes, quiet=("right", "refused", "alone"), wrong=wrong)


if __name__ == "__main__":
    sys.exit(main())
