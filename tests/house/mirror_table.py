"""Where the behaviour of a module is tested that has no test file of its name, and which tests are of no module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elsewhere:
    """Why a module has no test file of its name, and the tests that fail when it does wrong."""

    reason: str
    tests: tuple[str, ...]


def _each(modules: str, reason: str, *tests: str) -> dict[str, Elsewhere]:
    return dict.fromkeys((f"gopt.{name}" for name in modules.split()), Elsewhere(reason, tests))


KINDS = {
    "browser": "pages in headless Chromium",
    "benchmarks": "scripts of benchmarks/",
    "docs": "pages of docs/ against the code",
    "examples": "scripts of examples/",
    "fuzz": "damaged files by the thousand; no tests, but what hostile/ runs",
    "golden": "every pass as text: input, options, expected graph and result",
    "hostile": "files that are damaged or made to harm",
    "house": "the sources themselves: layers, names",
    "corpus": "real errors of sharding, planted in rank files",
    "laws": "what holds of every step that a generator makes",
    "numeric": "source and ranks run side by side, states compared",
    "real": "exports of real models",
    "derive_gen": "the generator of forward models",
    "steps_gen": "the generator of steps",
    "mesh_gen": "the generator of streams of tokens on meshes",
    "code_gen": "the generator of training code",
    "whole_gen": "the generator of steps whose truth is the source on the whole batch",
    "split_gen": "trainers and servers of a split, simulated beside their source",
}
"""Folders of tests that mirror no folder of gopt -> what they are."""

OTHERS = {
    "verification/proof/test_drawn_proofs.py": "proofs of drawn steps, right ones and planted errors",
    "verification/proof/test_split_holes.py": "wrong ranks that an adversary made by reading the laws",
    "cli/test_python_options.py": "commands beside the records of the verbs: fields, defaults, refusals",
    "offline/inference/test_merge_inference.py": "forwards of steps as they are evaluated",
    "offline/training_info/test_training_info_law.py": "what is written as training_info, run by three readers",
    "frontends/pytorch/test_dynamic_export.py": "steps of any number of samples, where torch is installed",
    "frontends/pytorch/test_torch_optimizers.py": "every optimizer of torch.optim with each of its flags",
    "frontends/pytorch/test_random_code.py": "training code drawn at random, beside PyTorch",
    "frontends/pytorch/test_training_code.py": "training code as users write it, and its traps",
    "frontends/pytorch/test_export_options.py": "options of an export, and the command without torch",
    "parameter_server/test_split_numbers.py": "splits, simulated beside their source",
    "parameter_server/test_split_plants.py": "errors planted in splits, which the simulation must see",
    "runtime/parameter_server/test_async_faults.py": "gradients that are no numbers and data that ends, without rounds",
    "runtime/parameter_server/test_async_tables.py": "tables without rounds, against a simulator of their own",
    "runtime/parameter_server/test_server_faults.py": "what a run of a split does about faults, on threads",
    "runtime/parameter_server/test_process_faults.py": "trainers and servers as processes, killed and asked to end",
    "runtime/parameter_server/test_server_run.py": "trainers and servers, from split to losses and checkpoints",
    "analysis/test_coupling_random.py": "how samples of a batch meet, in graphs drawn at random",
    "ir/opaque/test_shard_opaque.py": "steps with an opaque optimizer, from file to ranks",
    "runtime/engines/test_nccl_api.py": "the functions of NCCL that the engine calls",
    "runtime/engines/test_nccl_gpu.py": "the NCCL engine on a real GPU",
    "runtime/pytorch/test_drawn_models.py": "models and steps drawn at random, by PyTorch",
    "runtime/test_path_diagnostics.py": "paths of the wrong kind given to each command, beside trained checkpoints",
    "runtime/test_run.py": "gopt run, on threads and on processes",
    "runtime/test_run_messages.py": "what gopt run says of jobs that fail",
    "cli/test_streams.py": "a whole command where names, disks, streams and folders are not as they should be",
    "system/test_small_disk.py": "every command that writes, on a disk of every size",
    "system/test_every_command.py": "every command: lost outputs, names that would forge lines, modes, links, devices",
    "system/test_signal_sweep.py": "every command that runs, with stop signals at drawn times",
    "system/test_sweeps.py": "every command that writes, killed and failed at every write",
    "documents/test_record_damage.py": "damaged documents: schemas, readers and writers decide alike",
    "documents/test_damage.py": "every document that gopt reads, with every key damaged",
    "tensor_parallel/test_random_placements.py": "steps whose parameters are split by dimensions drawn at random",
    "tensor_parallel/test_meshes_generated.py": "streams of tokens on drawn meshes against a simulator of the contract",
    "spmd/test_rule_tables.py": "which operators the rules take, row by row, and no others",
    "spmd/test_bucket_steps.py": "errors planted in the buckets of fixtures",
    "spmd/test_placed_nodes.py": "nodes planted beside shards: what the verifier says that they make",
    "spmd/test_kept_steps.py": "errors planted in the computation of fixtures: refused, and unequal where they run",
    "spmd/test_mutants.py": "a step in which one thing is changed at random: what the verifier accepts runs equal",
}
"""Test files of no one module -> what they hold of many."""

_GOLDEN = "a rewrite: what it makes of a graph is seen in the text of its golden cases"
_SHARD = "a part of the pass shard, which is tested as a whole"
_WRITTEN = "what it writes is held against schemas and read back in tests of whole folders"
_NAMED = "one of the rules by which updates get a name: every optimizer of torch and near misses of each"
_SHOWN = "a table: what it shows is tested with its command"
_RECORDS = "records without behaviour"

TESTED_ELSEWHERE: dict[str, Elsewhere] = {
    **_each("documents.config documents.trace_record records.pass_facts", _RECORDS, "docs/test_document_schemas.py"),
    **_each(
        "importers.artifacts.lowering.activations importers.artifacts.lowering.arithmetic "
        "importers.artifacts.lowering.indexing importers.artifacts.lowering.losses "
        "importers.artifacts.lowering.normalisation importers.artifacts.lowering.value_types "
        "importers.artifacts.lowering.windows",
        "families of one table: every operator of it is compared with its kernel",
        "importers/artifacts/lowering/test_lowering_table.py",
    ),
    **_each(
        "importers.training_info.bindings importers.training_info.initialization "
        "importers.training_info.names importers.training_info.step",
        "one step of one file: every part is seen in what is read, or refused",
        "importers/test_training_info.py",
    ),
    **_each("operators.operator operators.table operators.elementwise operators.moves operators.reductions "
            "operators.products", "records", "operators/test_operators.py"),
    **_each("operators.executed operators.calls.layouts operators.calls.normalise "
            "operators.calls.losses operators.calls.attention operators.calls.recurrent operators.calls.resize "
            "operators.calls.quantise operators.calls.signals", "calls of records", "operators/test_torch_call.py"),
    **_each("importers.artifacts.hints", "hints", "importers/artifacts/test_join.py", "house/test_hints.py"),
    **_each("verbs.import_step cli.render_import", "the command and its record", "cli/test_import.py", "test_gopt.py"),
    **_each("verbs.folders verbs.export verbs.inspect verbs.plan", "examples of docstrings", "test_gopt.py"),
    **_each(
        "verification.certificate.lines verification.certificate.nodes verification.certificate.result",
        "rules of a certificate, each with every line changed", "verification/certificate/test_certificate_check.py",
        "verification/proof/test_certificate.py",
    ),
    **_each("verbs.verify verification.options", "options of a verb", "steps/test_shard_options.py", "test_gopt.py"),
    **_each(
        "verification.proof.boxes verification.proof.partial_sums verification.proof.exponentials "
        "verification.proof.choice_laws verification.proof.place_laws verification.proof.attributes "
        "verification.proof.calls verification.proof.comparison verification.proof.constants "
        "verification.proof.evaluation verification.proof.folder "
        "verification.proof.operators verification.proof.relation verification.proof.relation_file "
        "verification.proof.result verification.proof.samples "
        "verbs.prove cli.prove cli.render_prove",
        "one proof: its laws by numbers, its verdicts on right folders and on planted errors",
        "verification/proof/test_expressions.py", "verification/proof/test_proof_prove.py",
        "verification/proof/test_drawn_proofs.py", "verification/proof/test_proof_files.py",
    ),
    **_each("verification.proof.rank_sweep", "the sweep of one graph", "verification/proof/test_sweep.py"),
    **_each("__main__ frontends.pytorch.loop_rank", "PyTorch, by hand", "test_torch.py",
            "runtime/pytorch/test_pytorch_engine.py"),
    **_each("runtime.training.loaded_rank", "the ranks of a run", "runtime/test_run.py"),
    **_each("runtime.training.gathered_states", "states of evaluations", "runtime/training/test_evaluation.py"),
    **_each("verbs.training", "the threads of a run", "verbs/test_verbs_run.py", "runtime/test_run.py"),
    **_each("cli.golden_texts", "makes the texts of a command", "cli/test_cli_golden.py", "test_gopt.py"),
    **_each("cli.render_bar", "a bar of rich", "cli/test_render_progress.py"),
    **_each("cli.shard_request", "reads the options of a command", "cli/test_shard.py", "verbs/test_verbs_shard.py"),
    **_each("parameter_server.role_sizes", "figures of the report", "offline/test_inspect_split.py"),
    **_each("analysis.coupling.ignored_labels", "one kind of coupling", "analysis/test_coupling.py"),
    **_each("artifact.open_couplings", "couplings that stay", "laws/test_exactness.py", "numeric/test_adversary.py"),
    **_each("cli.demo cli.doctor cli.elsewhere", "small commands, and hints on options", "cli/test_help.py"),
    **_each("system.progress", "a signature", "verbs/test_verbs_shard.py"),
    **_each("steps.source steps.sharded steps.split steps.stored_roles", "the verbs themselves", "test_api.py",
            "test_gopt.py", "cli/test_shard.py"),
    **_each(
        "parameter_server.components parameter_server.node_placement parameter_server.options parameter_server.plan "
        "parameter_server.report parameter_server.servers parameter_server.trainers parameter_server.views "
        "parameter_server.trainer_nodes parameter_server.units "
        "parameter_server.folder",
        "what makes a split", "parameter_server/test_parameter_server_split.py",
    ),
    **_each(
        "runtime.parameter_server.job "
        "runtime.parameter_server.run runtime.parameter_server.server runtime.parameter_server.trainer "
        "runtime.parameter_server.trainer_messages runtime.parameter_server.outbox",
        "trainers and servers as they run", "runtime/parameter_server/test_server_run.py",
    ),
    **_each(
        "runtime.parameter_server.async_trainer runtime.parameter_server.sync_point",
        "trainers and servers without rounds", "runtime/parameter_server/test_async_server.py",
    ),
    **_each(
        "verification.replay.source_replay verification.replay.watched_server", "what a replay is compared with",
        "verification/replay/test_replay.py",
    ),
    **_each("cli.server_options", "options of three commands", "cli/test_cli_split.py", "offline/test_plan_split.py"),
    **_each("cli.render_split", _SHOWN, "cli/test_cli_split.py", "offline/test_inspect_split.py"),
    **_each("offline.plan_ranking", "the order of choices", "offline/test_offline_plan.py"),
    **_each("runtime.host_value", "values over shared memory", "runtime/test_memory.py", "runtime/test_session.py"),
    **_each("cli.plan_servers", "the command over offline.plan_split", "offline/test_plan_split.py"),
    **_each(
        "runtime.parameter_server.faults runtime.parameter_server.peers runtime.parameter_server.membership "
        "runtime.parameter_server.round_decision runtime.parameter_server.round_merge "
        "runtime.parameter_server.server_exchange "
        "runtime.parameter_server.trainer_data runtime.parameter_server.outlive",
        "what a run does about faults",
        "runtime/parameter_server/test_server_faults.py", "runtime/parameter_server/test_process_faults.py",
    ),
    **_each(
        "offline.seal cli.seal cli.unchecked_option system.hashed runtime.training.folder_files",
        "digests of files: taken, compared, renewed, left out", "artifact/test_integrity.py",
    ),
    **_each("cli.render_provenance", "the table of --explain", "offline/test_provenance.py"),
    **_each("cli.run_servers", "the command for a split", "runtime/parameter_server/test_server_run.py"),
    **_each("runtime.training.hyper_parameters", "values fed in every step", "runtime/test_run.py"),
    **_each("parameter_server.table_pulls", "rows on trainers", "parameter_server/test_table_choice.py"),
    **_each(
        "artifact.server_entries artifact.table_parts", _RECORDS,
        "parameter_server/test_parameter_server_split.py", "parameter_server/test_table_choice.py",
    ),
    **_each("collectives.messages", "messages as schemas", "collectives/test_schemas.py"),
    **_each("spmd.shardings", "the table that the verifier fills", "spmd/test_verifier.py"),
    **_each("lower.rank_graph", _RECORDS, "lower/test_specialise.py"),
    **_each(
        "lower.lowering", "the order in which ranks are made and checked", "lower/test_invariants.py",
        "lower/test_agreement.py",
    ),
    **_each("lower.lowered", _RECORDS, "lower/test_layout_operators.py", "lower/test_member_operators.py"),
    **_each(
        "operators.dims.choices operators.dims.elements operators.dims.link operators.dims.moves "
        "operators.dims.normalise operators.dims.products operators.dims.windows spmd.links.windows",
        "families of one table: every operator of it is run whole and split", "spmd/test_links.py",
    ),
    **_each("tensor_parallel.losses", "written by expansions", "tensor_parallel/test_expansions.py"),
    **_each(
        "tensor_parallel.converted_values tensor_parallel.propagated", "parts of a sweep",
        "tensor_parallel/test_propagate.py",
    ),
    **_each("tensor_parallel.split_program", "the body of the pass", "passes/test_tensor_parallel.py"),
    **_each("errors", "classes with their exit codes, which every command ends with", "cli/test_main.py"),
    **_each(
        "spmd.program", "the step that passes change: what it says of states is what ranks hold",
        "lower/test_agreement.py", "lower/test_invariants.py", "golden",
    ),
    # --- artifacts ---
    **_each(
        "analysis.startup importers.training_info.startup runtime.training.startup verification.startup_check",
        "one feature: written, run, compared, refused", "artifact/test_startup_graphs.py",
    ),
    **_each(
        "artifact.manifest artifact.manifest_entries", _RECORDS, "artifact/test_report_record.py",
        "runtime/test_run.py",
    ),
    **_each(
        "artifact.report_check artifact.graph_check", "every key damaged, and refused by name",
        "documents/test_damage.py",
    ),
    **_each(
        "artifact.server_key_check", "keys of a split, damaged one by one", "artifact/test_server_plan_check.py",
    ),
    **_each(
        "artifact.manifest_builder artifact.report_builder", _WRITTEN, "docs/test_formats.py", "cli/test_shard.py",
        "golden",
    ),
    **_each(
        "artifact.removals artifact.additions artifact.step_size artifact.report_tables", _WRITTEN,
        "artifact/test_report_groups.py",
    ),
    **_each("cli.report", "the command over offline.html_report", "offline/html_report/test_html_report_write.py"),
    **_each("offline.html_report.record", _RECORDS, "offline/html_report/test_html_report_data.py"),
    **_each(
        "offline.html_report.verification_record", _RECORDS, "offline/html_report/test_html_report_proof.py",
    ),
    **_each("offline.html_report", "names of its parts", "offline/html_report/test_html_report_write.py"),
    **_each("cli.explain cli.render_explain", "the command prints the story", "offline/test_offline_explain.py"),
    **_each("cli.render_before_after", "a table of two commands", "cli/test_inspect.py", "docs/test_report_page.py"),
    **_each(
        "offline.explain.folder_index offline.explain.stories offline.explain.split_stories offline.explain.story "
        "offline.explain.wiring", "parts of one answer", "offline/test_offline_explain.py",
    ),
    **_each("artifact.ranks artifact.serialize", _WRITTEN, "cli/test_shard.py", "offline/test_merge.py", "numeric"),
    **_each(
        "artifact.optimizer_report", "rows of the report on opaque optimizers", "ir/opaque/test_shard_opaque.py",
        "golden/refold-optimizers",
    ),
    **_each("artifact.path_diagnostics", "needs trained checkpoints", "runtime/test_path_diagnostics.py"),
    # --- collectives ---
    **_each("collectives.call", "a use of a record, read and typed", "collectives/test_collectives_rules.py"),
    # --- commands ---
    **_each("cli.__main__", "python -m gopt.cli", "cli/test_streams.py"),
    **_each(
        "frontends.pytorch.check frontends.pytorch.convert frontends.pytorch.eager "
        "frontends.pytorch.eager_code frontends.pytorch.eager_states "
        "frontends.pytorch.hyper frontends.pytorch.schedules "
        "frontends.pytorch.recorded_step frontends.pytorch.states frontends.pytorch.tracing "
        "cli.export cli.render_export",
        "whole exports against eager PyTorch, where torch is installed", "frontends/pytorch/test_pytorch_export.py",
    ),
    **_each(
        "autodiff.backward autodiff.bfloat16 autodiff.cuts autodiff.operators autodiff.no_ops autodiff.pools "
        "autodiff.refusals autodiff.rewrites "
        "autodiff.repairs autodiff.seed_axis autodiff.shapes autodiff.seed_rules autodiff.sequences autodiff.values "
        "frontends.derive.functions frontends.derive.gradient_rules "
        "frontends.derive.optimizers "
        "frontends.derive.schedules frontends.derive.update "
        "frontends.functional_step verbs.derive cli.derive cli.render_derive",
        "whole derivations against PyTorch's numbers; rewrites of graphs, run before and after",
        "frontends/derive/test_derive.py", "autodiff/test_simplify.py", "autodiff/test_differentiate.py",
        "frontends/derive/test_forward_model.py",
    ),
    **_each(
        "offline.inference.batch_norm offline.inference.forward_subgraph offline.inference.dropout "
        "offline.inference.forward offline.inference.write", "whole models beside the same network by hand",
        "offline/inference/test_merge_inference.py",
    ),
    **_each(
        "frontends.pytorch.eager_steps frontends.pytorch.python_numbers frontends.pytorch.reads "
        "frontends.pytorch.surroundings",
        "values in Python that a step changes, where torch is installed", "frontends/pytorch/test_python_values.py",
    ),
    **_each(
        "frontends.pytorch.optimizer_runs frontends.pytorch.narrow_noise",
        "first steps and roundings of whole exports, where torch is installed", "frontends/pytorch/test_first_steps.py",
    ),
    **_each(
        "frontends.pytorch.module_record", "names of a module and its optimizers, where torch is installed",
        "frontends/pytorch/test_state_file.py",
    ),
    **_each("frontends.pytorch.sized_constants", "every form of a constant", "frontends/pytorch/test_batch_sizes.py"),
    **_each("frontends.pytorch.samples", "which inputs have samples", "frontends/pytorch/test_size_branches.py"),
    **_each("frontends.pytorch.options", "refused values", "frontends/pytorch/test_export_options.py"),
    **_each("cli.load_state", "one command over offline.state_values", "offline/test_state_values.py"),
    **_each("artifact.safetensors_file", _WRITTEN, "offline/test_state_values.py", "runtime/training"),
    **_each("cli.command_line cli.reproducer_option cli.reduce", "what the commands share", "cli/test_reproduce.py"),
    **_each(
        "offline.reproducer.record offline.reproducer.values", "records, and values of what is kept",
        "offline/reproducer/test_archive.py", "offline/reproducer/test_inputs.py",
    ),
    **_each(
        "offline.reduce.cut offline.reduce.graph_view offline.reduce.search offline.reduce.sizes offline.reduce.steps",
        "parts of one search, judged by the graph that is left", "offline/reduce/test_reduction.py",
    ),
    **_each("cli.merge", "two options over offline.merge", "offline/test_merge.py", "artifact/test_output_paths.py"),
    **_each("cli.render_inspect", _SHOWN, "cli/test_inspect.py", "cli/test_diff.py"),
    **_each("cli.render_plan", _SHOWN, "cli/test_plan.py"),
    **_each("cli.render_verify", _SHOWN, "cli/test_main.py", "verification/test_verify.py"),
    **_each(
        "cli.evaluation_options runtime.training.evaluator", "evaluations of gopt run",
        "runtime/training/test_evaluation.py",
    ),
    **_each("cli.run cli.run_ranks cli.run_report", "trains", "runtime/test_run.py", "runtime/test_run_messages.py"),
    **_each("cli.verify", "compares", "verification/test_verify.py", "cli/test_main.py"),
    # --- offline ---
    **_each(
        "offline.diff.checkpoints offline.diff.folders offline.diff.models offline.diff.nodes offline.diff.pairing",
        "a part of one comparison, tested by what it says of two models", "offline/test_offline_diff.py",
    ),
    **_each("offline.diff.result", _RECORDS, "cli/test_diff.py"),
    **_each("cli.render_diff", _SHOWN, "cli/test_diff.py", "offline/diff/test_review.py"),
    **_each("cli.render_golden", _SHOWN, "cli/test_cli_golden.py"),
    **_each("offline.inspect_folder", "shares its tests with inspect", "offline/test_offline_inspect.py"),
    **_each(
        "offline.kinds", "what the registry has", "offline/kinds/test_kinds_registry.py", "cli/test_render_kinds.py"
    ),
    **_each("offline.folder_contents", "what merge reads", "offline/test_merge.py", "documents/test_damage.py"),
    **_each(
        "offline.optimizer.evidence offline.optimizer.formulas offline.optimizer.probe",
        _NAMED, "offline/test_offline_optimizer.py", "offline/test_offline_inspect.py",
    ),
    **_each(
        "offline.optimizer.clips offline.optimizer.gradient_path", "what clips a gradient, in every spelling",
        "offline/test_offline_optimizer.py",
    ),
    **_each("offline.optimizer.controls", "what steers an update", "offline/test_offline_inspect.py"),
    # --- passes ---
    **_each("passes", "the table of passes", "passes/test_passes_base.py"),
    **_each("passes.hoist_casts", _GOLDEN, "golden/hoist-casts", "passes/test_passes_shard.py"),
    **_each("passes.prune", _GOLDEN, "golden/prune"),
    **_each(
        "passes.recompute.choose passes.recompute.copies passes.recompute.forward passes.recompute.min_cut", _GOLDEN,
        "golden/recompute", "passes/test_recompute.py",
    ),
    **_each(
        "passes.refold_optimizers passes.refold_optimizers.match", _GOLDEN, "golden/refold-optimizers",
        "ir/opaque/test_shard_opaque.py",
    ),
    **_each(
        "passes.fuse_collectives.diagnose passes.fuse_collectives.emit passes.fuse_collectives.order "
        "passes.fuse_collectives.pack passes.fuse_collectives.rules",
        "a part of the pass, which is tested as a whole", "passes/test_fuse_collectives.py", "golden/fuse-collectives",
    ),
    **_each(
        "passes.shard.emit passes.shard.emitted_bucket passes.shard.gradient_reduction passes.shard.parameter_gather "
        "passes.shard.plan passes.shard.scalar_reductions passes.shard.split passes.shard.whole",
        _SHARD, "golden/shard", "passes/test_passes_shard.py", "numeric/test_knobs.py",
    ),
    **_each("passes.shard.options", "every pair of them", "numeric/test_knobs.py", "cli/test_main.py", "golden/shard"),
    **_each("analysis.synchronised_values", _RECORDS, "numeric/test_synchronised.py", "docs/test_formats.py"),
    **_each(
        "analysis.statistic_points analysis.coupling.statistics analysis.coupling.sample_counts "
        "analysis.coupling.divided_sums analysis.coupling.open_statistics passes.statistics.calls "
        "analysis.coupling.gathered_rows analysis.coupling.ring_places passes.statistics.rows "
        "analysis.partial_losses analysis.chosen_statistics",
        "how ranks combine statistics", "numeric/test_roles_cases.py", "laws/test_kinds_roles.py",
    ),
    **_each("passes.shard.loss_weights", _SHARD, "numeric/test_loss_reduction.py", "golden/shard"),
    **_each("passes.shard.shared_scalars", _SHARD, "numeric/test_shared_values.py"),
    # --- analysis ---
    **_each("analysis.batch_checks", "batches that no mesh can share out", "laws/test_steps.py"),
    **_each(
        "analysis.coupling.context analysis.coupling.contract analysis.coupling.lookups analysis.coupling.marks "
        "analysis.coupling.pointwise analysis.coupling.propagate analysis.coupling.reduced analysis.coupling.shapes "
        "analysis.coupling.step_couplings analysis.coupling.transfer_functions",
        "a part of one analysis, held against perturbed batches", "analysis/test_coupling.py",
        "analysis/test_coupling_random.py",
    ),
    **_each(
        "analysis.coupling.joint_gradients", "a refusal of steps that several gradients enter", "laws/test_whole.py"
    ),
    **_each(
        "analysis.coupling.gradient_reductions analysis.coupling.gradient_units analysis.coupling.loss_terms "
        "analysis.coupling.units verification.inexact_reductions",
        "a part of one analysis, held against steps on large batches", "laws/test_exactness.py",
    ),
    **_each("analysis.coupling.samples_axis", "a part of one analysis", "laws/test_time_first.py"),
    **_each("analysis.coupling.synchronise", "statistics over all samples", "numeric/test_synchronised.py"),
    **_each("analysis.loss_reduction", "sums, means and weights", "numeric/test_loss_reduction.py"),
    **_each("analysis.shared_values", "forward values that updates read", "numeric/test_shared_values.py"),
    **_each("analysis.source_collectives", "calls of the source", "numeric/test_existing_collectives.py"),
    **_each(
        "analysis.analysis_context analysis.dominators analysis.gradient_fixpoint analysis.local_taint "
        "analysis.state_matching analysis.step_skeleton analysis.layout_aliases",
        "a part of the recovery of roles: which gradients and states a step has", "analysis/test_gradients.py",
        "analysis/test_roles.py", "laws/test_steps.py",
    ),
    **_each("analysis.training", "kinds of states", "analysis/test_roles.py", "laws/test_steps.py"),
    **_each(
        "analysis.updates", "which updates split", "analysis/test_ownership.py",
        "laws/test_random_updates.py", "golden/shard",
    ),
    # --- files in ---
    **_each("ir.graph_io ir.tensor_proto", "inputs, outputs and values of a file", "ir/test_load.py", "ir/test_npz.py"),
    **_each(
        "ir.opaque.body_builder ir.opaque.operator_schema ir.opaque.optimizer_math ir.opaque.ort_optimizers "
        "ir.opaque.preview_optimizers ir.opaque.table",
        "what an optimizer operator computes, held against its formula", "ir/opaque/test_table_body.py",
    ),
    **_each(
        "ir.opaque.expand ir.opaque.function_export ir.opaque.origin ir.opaque.refold ir.opaque.schema_roles",
        "how a step with an opaque optimizer is read and written", "ir/opaque/test_shard_opaque.py",
        "golden/refold-optimizers",
    ),
    # --- runtime ---
    **_each(
        "runtime.capacity runtime.device runtime.reference_eval runtime.shared_memory "
        "runtime.training.checkpoint runtime.training.job runtime.training.train runtime.training.trace "
        "runtime.training.stop_signal runtime.engines.launch runtime.engines.mpi",
        "a part of a job, which is run", "runtime/test_run.py", "runtime/test_run_messages.py",
    ),
    **_each(
        "runtime.engines.launcher_folder runtime.engines.rank_status", "how ranks end, and what others say of it",
        "runtime/engines/test_heartbeat.py",
    ),
    **_each(
        "runtime.engines.cuda runtime.engines.gpu runtime.engines.kernels runtime.engines.staging",
        "memory and streams of a GPU; with a fake one where there is none", "runtime/engines/test_nccl.py",
        "runtime/engines/test_nccl_gpu.py",
    ),
    **_each(
        "runtime.fallback_kernels runtime.resize runtime.widen runtime.windows runtime.proto",
        "a graph in double precision", "runtime/test_float64.py",
    ),
    **_each(
        "runtime.planner.assignment runtime.planner.buffers", "buffers of calls",
        "runtime/planner/test_buffer_assignment.py",
    ),
    **_each("runtime.runtime_errors", "why a node failed", "runtime/test_run_messages.py"),
    **_each("runtime.tuning.llvm_kernels", "kernels of runs", "runtime/tuning/test_tiling.py"),
    **_each(
        "runtime.messages.mailbox runtime.messages.roster", "what lies in a mailbox, and who takes part",
        "runtime/messages/test_message.py",
    ),
    **_each(
        "runtime.messages.hub runtime.messages.outgoing", "what an endpoint stands on",
        "runtime/messages/test_endpoint.py",
    ),
    **_each(
        "runtime.messages.order", "which message is received next", "runtime/messages/test_messages_threads.py",
    ),
    **_each(
        "runtime.messages.transfers", "a part of jobs of processes, which are run",
        "runtime/messages/test_messages_mpi.py",
    ),
    # --- verification ---
    **_each("verification.engine_check", _RECORDS, "verification/test_second_engine.py"),
    **_each("verification.large_batch", _RECORDS, "verification/test_joined_step.py"),
    **_each("verification.joined_graph", "the source for all samples at once", "verification/test_joined_step.py"),
    **_each(
        "verification.all_ranks verification.compare verification.conditions verification.lockstep "
        "verification.rank_programs verification.reference_graphs verification.reference_step "
        "verification.sampling verification.schedule verification.variants "
        "verification.verification_run",
        "a part of one proof, tested by what it says of wrong ranks", "verification/test_verify.py",
        "numeric/test_adversary.py", "numeric/test_fixtures.py",
    ),
    **_each(
        "verification.gradient_check.additivity verification.gradient_check.alternatives "
        "verification.gradient_check.check verification.gradient_check.computed_weights "
        "verification.gradient_check.difference_quotients verification.gradient_check.forward "
        "verification.gradient_check.layout verification.gradient_check.points "
        "verification.gradient_check.single_values verification.gradient_check.verdict",
        "a part of the gradient check, tested by wrong gradients", "verification/test_gradient_check.py",
    ),
    # --- the core ---
    **_each("lower.phases", "files of accumulating steps", "passes/test_passes_shard.py", "numeric/test_fixtures.py"),
}  # fmt: skip
