"""Generated steps whose parameters are split at random: ``cd tests && python tensor_parallel/fuzz_placements.py``.

``--seed S --minutes M``. Prints what is refused, not confirmed or not equal, with its seed, and counts at the end.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import draws
from steps_gen.judge import verified
from steps_gen.make import Made, make
from steps_gen.plan import draw

import gopt
from gopt.api import Source
from gopt.errors import GoptError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh

MESHES = ("tp=2", "tp=2", "shard=2,tp=2", "dp=2,tp=2")


def placements(source: Source, generator: random.Random) -> str:
    """A dimension for most parameters that have an even one; '' where none has."""
    words, split = [], False
    for state in source.training.parameters:
        dims = source.training.graph.types[state.tensor].dims
        even = [dim for dim, size in enumerate(dims) if size and size % 2 == 0]
        chosen = bool(even) and (generator.random() < 0.6 or not words)
        split = split or chosen
        words.append(f"{state.tensor}:dim{generator.choice(even)}" if chosen else f"{state.tensor}:replicate")
    return ";".join(words) if split else ""


def outcome(made: Made, seed: int, folder: Path) -> tuple[str, str]:
    """What became of a step, and what was said."""
    generator = random.Random(seed)
    path = folder / "step.onnx"
    path.write_bytes(made.model.SerializeToString(deterministic=True))
    try:
        source = gopt.load(path)
        words = placements(source, generator)
        if not words:
            return "nothing to split", ""
        mesh, stage = generator.choice(MESHES), generator.choice([0, 1, 2, 3])
        options = {"tensor-parallel": {"parameters": words, "auto": False}, "shard": {"stage": stage}}
        pipeline = build_pipeline(defaults=options)
        micro = generator.choice([1, 1, 1, 2])
        gopt.shard(source, Mesh.parse(mesh), accumulate=micro, pipeline=pipeline).write(folder / "out")
    except GoptError as error:
        return ("refused" if error.exit_code in (2, 3, 4) else "CRASH"), error.message
    code, text = verified(folder / "out", made)
    return {0: "equal", 1: "NOT EQUAL", 4: "not confirmed"}.get(code, "CRASH"), text if code else ""


def main() -> int:
    options = draws.parser("fuzz_placements", __doc__, random.SystemRandom().randrange(10**8), minutes=5.0).parse_args()

    def case(seed: int) -> draws.Case:
        with tempfile.TemporaryDirectory() as folder:
            found, said = outcome(make(draw(seed)), seed, Path(folder))
        return draws.Case(f"seed {seed}", f"seed {seed}", found, said[:200], said[:110])

    quiet = ("equal", "nothing to split")
    wrong = ("CRASH", "NOT EQUAL").__contains__
    return draws.run(draws.of_seeds(options, case), options.minutes, quiet=quiet, wrong=wrong)


if __name__ == "__main__":
    sys.exit(main())
