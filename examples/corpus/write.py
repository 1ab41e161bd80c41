"""Write the corpus of sharding errors: ``python examples/corpus/write.py DIR [NUMBER ...]``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from corpus.plants import PLANTS


def main(arguments: Sequence[str]) -> None:
    """Write the right folder of each recipe, the planted folders, and index.json."""
    home, numbers = Path(arguments[0]), set(map(int, arguments[1:]))
    home.mkdir(parents=True, exist_ok=True)
    index = []
    for plant in sorted(PLANTS, key=lambda plant: plant.number):
        if numbers and plant.number not in numbers:
            continue
        right, planted = home / plant.recipe.folder, home / plant.name
        if not right.exists():
            plant.recipe.write(right)
        shutil.copytree(right, planted)
        plant.plant(planted)
        index.append({
            "number": plant.number, "source": plant.source, "kind": plant.kind, "wrong": plant.wrong,
            "right": right.name, "planted": planted.name, "edited": [path.name for path in plant.files(planted)],
            "step": plant.step,
        })  # fmt: skip
    (home / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    print(f"{len(index)} planted folders in {home}")


if __name__ == "__main__":
    main(sys.argv[1:])
