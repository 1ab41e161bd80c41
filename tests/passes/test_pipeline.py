"""A pipeline is data: read from text, checked before any work, and each pass checked behind it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from helpers import source

from gopt.errors import InvariantError, OptionError, UnsupportedError
from gopt.passes import DEFAULT
from gopt.passes.base import Pass
from gopt.passes.pipeline import PassInstance, Pipeline, build_pipeline, parse_pipeline
from gopt.records.mesh import Mesh
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram


@dataclass(frozen=True, kw_only=True)
class Options:
    """Nothing to choose."""


def program() -> SpmdProgram:
    return SpmdProgram.start(source("mlp_sgd").training, Mesh.parse("shard=2"))


def instance(name: str, apply: object = None, after: tuple[str, ...] = ()) -> PassInstance:
    def nothing(program: SpmdProgram, options: Options) -> PassResult:
        """Do nothing."""
        return PassResult(note=name)

    return PassInstance(Pass(name, Options, apply or nothing, after=after), Options())  # type: ignore[arg-type]


def drop_a_node(program: SpmdProgram, options: Options) -> PassResult:
    """Leave the readers of a node without its value."""
    program.graph.nodes.pop(0)
    return PassResult()


# --- text -------------------------------------------------------------------------------------------------------------


def test_names_and_options_are_read():
    assert parse_pipeline(" shard{stage=1, bucket-mb = 4 } ,prune,overlap{}") == [
        ("shard", {"stage": "1", "bucket-mb": "4"}), ("prune", {}), ("overlap", {}),
    ]  # fmt: skip


def test_a_list_is_one_value():
    """The second word was read as an option of its own, so that such options fitted no ``--pipeline``."""
    assert parse_pipeline("offload{what=states, activations,least=1B}") == [
        ("offload", {"what": "states,activations", "least": "1B"})
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shard{stage=1", "cannot read the pipeline at 'shard{stage=1'"),
        ("shard prune", "cannot read the pipeline at 'shard prune'"),
        ("prune,shard{a={}}", "cannot read the pipeline at 'shard{a={}}'"),
        ("shard{stage}", "cannot read 'stage' in the options of shard"),
        ("", "the pipeline is empty"),
    ],
)
def test_text_that_is_no_pipeline(text, said):
    with pytest.raises(OptionError) as caught:
        parse_pipeline(text)
    assert said in caught.value.message


# --- what is built ----------------------------------------------------------------------------------------------------


def test_the_default_pipeline_is_the_default():
    assert tuple(stage.spec.name for stage in build_pipeline().stages) == DEFAULT


def test_an_item_goes_before_a_default():
    pipeline = build_pipeline([("shard", {"stage": "1"})], defaults={"shard": {"stage": 3, "partition": "rows"}})
    options = pipeline.stages[0].options
    assert (options.stage, options.partition.value) == (1, "rows")


def test_a_default_of_a_pass_that_is_not_there_is_not_dropped():
    with pytest.raises(OptionError, match="options are given for pass shard, which is not in the pipeline: stage"):
        build_pipeline([("prune", {})], defaults={"shard": {"stage": 1}})
    build_pipeline([("prune", {})], defaults={"shard": {}})


def test_order_and_repetition():
    with pytest.raises(OptionError, match="pass late cannot run before early") as caught:
        Pipeline((instance("late", after=("early",)), instance("early")))
    assert caught.value.hints == ("put early in front of it",)
    with pytest.raises(OptionError, match="pass a is in the pipeline twice"):
        Pipeline((instance("a"), instance("b"), instance("a")))


# --- what is run ------------------------------------------------------------------------------------------------------


def test_passes_are_recorded_in_order():
    seen: list[tuple[str, list[str]]] = []
    step = program()
    done = Pipeline(
        (instance("a"), instance("b")), after_each=lambda name, program: seen.append((name, [*program.applied]))
    ).run(step)
    assert [(ran.record.name, ran.record.note) for ran in done] == [("a", "a"), ("b", "b")]
    assert seen == [("a", ["a"]), ("b", ["a", "b"])]


@pytest.mark.parametrize(("verify_each", "blamed", "before"), [(True, "broken", "a"), (False, "b", "a, broken")])
def test_a_graph_that_a_pass_breaks(verify_each, blamed, before):
    """At once with ``verify_each``; behind the last pass always."""
    stages = (instance("a"), instance("broken", drop_a_node), instance("b"))
    with pytest.raises(InvariantError) as caught:
        Pipeline(stages, verify_each=verify_each).run(program())
    assert caught.value.message.startswith(f"pass {blamed}: ")
    assert caught.value.hints == (f"passes already run: {before}",)


def test_a_refusal_is_no_defect_of_the_pass():
    def refuse(program: SpmdProgram, options: Options) -> PassResult:
        """Refuse."""
        raise UnsupportedError("not this one", "take another")

    with pytest.raises(UnsupportedError) as caught:
        Pipeline((instance("a", refuse),)).run(program())
    assert (caught.value.message, caught.value.hints) == ("not this one", ("take another",))
