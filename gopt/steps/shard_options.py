"""The options of ``gopt shard`` as one record, and the resulting pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from gopt.analysis.role_map import parse_statistics
from gopt.errors import OptionError
from gopt.options.records import check_types, spelled
from gopt.options.types import is_whole
from gopt.passes import DEFAULT, ON_REQUEST, find, joined
from gopt.passes.pipeline import Pipeline, build_pipeline
from gopt.spmd.program import SpmdProgram

Options = Mapping[str, Mapping[str, Any]]
"""Options of passes: pass -> option -> value."""
PASS_OPTIONS = {
    "stage": ("shard", "stage"),
    "partition": ("shard", "partition"),
    "bucket_mb": ("shard", "bucket-mb"),
    "loss_reduction": ("shard", "loss-reduction"),
    "statistics": ("statistics", "statistics"),
    "recompute": ("recompute", "policy"),
    "offload": ("offload", "what"),
    "link": ("tensor-parallel", "link"),
    "schedule": ("pipeline", "schedule"),
}
"""Field -> the pass and the option that it sets."""


@spelled
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How a step is sharded. None in a field leaves the default to the pass.

    ``stage``: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too. ``partition``: where tensors may
    be cut: ``flat``, ``rows`` or ``whole``. ``bucket_mb``: cap of a bucket in MiB; 0 is one tensor a call.
    ``statistics``: ``auto``, ``mean``, ``root``, ``local`` or ``sync``, and ``NAME=RULE`` for single states.
    ``loss_reduction``: ``mean``, ``sum``, ``weighted:VALUE``, ``sum:PARAMETER,PARAMETER`` or ``auto``. ``accumulate``:
    micro-steps of one update. ``recompute``: what the backward computes again: ``full``, ``selective``, or the bytes
    that a rank may have alive, such as ``200MiB``. ``link``: links between ranks for tensor parallelism, such as
    ``200GB/s:5us``.
    ``offload``: what is in the memory of the host, with commas between: ``states`` of the optimizer, ``activations``
    between forward and backward, patterns over names, or the bytes that a rank may have alive on its device.
    ``schedule``: the order of micro-batches on pipeline stages: ``gpipe``, ``1f1b``, ``interleaved:V``, ``zb-h1``,
    ``zb-v``, or a file.
    ``only_ranks``: the ranks that are made; None: all. ``passes``: options of passes, such as ``{"shard": {"style":
    "broadcast"}}``; ``gopt passes`` lists them. ``pipeline``: passes in order, each with options that override
    ``passes``; None: the default passes. A Pipeline has all its options. ``verify_each``: check the graph after
    every pass, not only at the end. ``after_each``: called after each pass with its name and the program.
    """

    stage: int | None = None
    partition: str | None = None
    bucket_mb: float | None = None
    statistics: str | None = None
    loss_reduction: str | None = None
    accumulate: int = 1
    recompute: str | None = None
    offload: str | None = None
    link: str | None = None
    schedule: str | None = None
    only_ranks: Sequence[int] | None = None
    passes: Options = field(default_factory=dict)
    pipeline: Pipeline | Sequence[tuple[str, Mapping[str, Any]]] | None = None
    verify_each: bool = False
    after_each: Callable[[str, SpmdProgram], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_types(self, but=("passes", "pipeline", "only_ranks", "after_each"))
        _check_passes(self.passes, self.pipeline)
        _check_ranks(self.only_ranks)
        if self.after_each is not None and not callable(self.after_each):
            raise OptionError(f"option after_each cannot be {self.after_each!r}", "it takes a function")
        if self.accumulate < 1:
            raise OptionError(
                f"--accumulate cannot be {self.accumulate}", "it is the number of micro-steps of one update"
            )

    @property
    def named_statistics(self) -> dict[str, str]:
        """The states named by ``statistics``, and the rule by which ranks combine each."""
        return parse_statistics(self.statistics or "")[1]

    @property
    def asked_stage(self) -> object:
        """The requested stage; None without an option for the stage, and with a Pipeline, whose passes have all
        options."""
        if self.stage is not None:
            return self.stage
        items = [] if self.pipeline is None or isinstance(self.pipeline, Pipeline) else self.pipeline
        tables = [*(table for name, table in items if name == "shard"), self.passes.get("shard", {})]
        return next((table["stage"] for table in tables if "stage" in table), None)

    def passes_to_run(self) -> Pipeline:
        """The pipeline of these options. Raises OptionError for an option given twice, or without a pass."""
        if isinstance(self.pipeline, Pipeline):
            if self.passes or self._pass_options():
                raise OptionError("a built pipeline has its options already", "give them where it is built")
            return self.pipeline
        items = self.pipeline
        options = {name: dict(table) for name, table in self.passes.items()}
        for owner in options:
            find(owner)
        for owner, option, value in self._pass_options():
            if option in options.get(owner, {}) or any(
                name == owner and option in passed for name, passed in items or ()
            ):
                raise OptionError(f"option {option} of pass {owner} is given twice", "give it once")
            options.setdefault(owner, {})[option] = value
        self._cap_fused(options)
        if items is None:
            items = joined([(name, {}) for name in DEFAULT], options.keys() & ON_REQUEST)
        return build_pipeline(items, options, verify_each=self.verify_each, after_each=self.after_each)

    def _pass_options(self) -> list[tuple[str, str, Any]]:
        """Pass, option and value of each given field."""
        word = {"statistics": parse_statistics(self.statistics or "")[0]}
        values = ((name, word[name] if name in word else getattr(self, name)) for name in PASS_OPTIONS)
        return [(*PASS_OPTIONS[name], value) for name, value in values if value is not None]

    def _cap_fused(self, options: dict[str, dict[str, Any]]) -> None:
        """``bucket_mb`` caps fused calls as well, unless they have a separate cap."""
        items = self.pipeline
        assert not isinstance(items, Pipeline)
        fused = items is None or any(name == "fuse-collectives" and "cap-mb" not in passed for name, passed in items)
        if self.bucket_mb is not None and fused:
            options.setdefault("fuse-collectives", {}).setdefault("cap-mb", self.bucket_mb)


def _check_passes(passes: Any, pipeline: Any) -> None:
    """Raise OptionError for a value that is no table or list of passes."""
    if not _is_table(passes) or not all(map(_is_table, passes.values())):
        raise OptionError(f"option passes cannot be {passes!r}", 'write it as {"shard": {"style": "broadcast"}}')
    if pipeline is None or isinstance(pipeline, Pipeline):
        return
    if not isinstance(pipeline, Sequence) or not all(map(_is_entry, pipeline)):
        raise OptionError(f"option pipeline cannot be {pipeline!r}", 'write it as [("shard", {"stage": 1}), ...]')


def _is_entry(entry: Any) -> bool:
    """Return whether an item is a pass with options."""
    return isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], str) and _is_table(entry[1])


def _is_table(table: Any) -> bool:
    return isinstance(table, Mapping) and all(isinstance(name, str) for name in table)


def _check_ranks(ranks: Any) -> None:
    """Raise OptionError for a value that is no list of ranks, or an empty list."""
    if ranks is None:
        return
    try:
        fine = len(ranks) > 0 and not isinstance(ranks, bytes | Mapping) and all(map(is_whole, ranks))
    except TypeError:  # it has no length: an iterator would be empty afterwards
        fine = False
    if not fine:
        raise OptionError(f"option only_ranks cannot be {ranks!r}", "write the ranks as [0, 2], or leave it out")


class ShardKeywords(TypedDict, total=False):
    """The fields of ``ShardOptions`` as keywords of a verb."""

    stage: int | None
    partition: str | None
    bucket_mb: float | None
    statistics: str | None
    loss_reduction: str | None
    accumulate: int
    recompute: str | None
    offload: str | None
    link: str | None
    schedule: str | None
    only_ranks: Sequence[int] | None
    passes: Options
    pipeline: Pipeline | Sequence[tuple[str, Mapping[str, Any]]] | None
    verify_each: bool
    after_each: Callable[[str, SpmdProgram], None] | None
