"""Training code drawn at random: ``cd tests && python -m code_gen --seed 1 --minutes 5``. Needs torch.

Each is exported and compared with PyTorch on fresh batches; one in five is sharded for two ranks as well, and trained
beside PyTorch with averaged gradients. Prints what differs and counts what is refused, by reason.
"""

from __future__ import annotations

import sys

import draws

from code_gen.judge import judge


def one(seed: int) -> draws.Case:
    verdict = judge(seed, ranks=seed % 5 == 0)
    return draws.Case(f"seed {seed}", verdict.told, verdict.outcome, verdict.why, verdict.why[:110])


def main() -> int:
    parser = draws.parser("code_gen", __doc__)
    parser.add_argument("--verbose", action="store_true", help="print refusals with their code too")
    options = parser.parse_args()
    quiet = ("equal", "equal on ranks", *([] if options.verbose else ["refused"]))
    return draws.run(draws.of_seeds(options, one), options.minutes, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
