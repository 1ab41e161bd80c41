"""Identifies the optimizer that updates a parameter, its constants, and the controls around it.

A rule is found by running the update on numbers, and accepted only if it reproduces them. In the order in which
``recogniser`` uses them:

- ``gradient_path`` follows the gradient to the input of the rule;
- ``probe_harness`` runs the small values of the update, ``update_function`` one parameter's, both with ``numpy_ops``;
- ``sampler`` measures the new values of states;
- ``rules`` lists one formula a rule (``sgd_rules``, ``rms_rules``, ``adam_rules``); each yields a ``fits.Fit``;
- ``fit_rule`` takes numbers that are equal in all trials as hyper-parameters, with ``evidence``;
  ``step_count_rules`` has the rules that follow the count of steps.

``predicates``, ``clips`` and ``controls`` find the rest: schedule, clip, finite check, loss scale, accumulation.
"""
