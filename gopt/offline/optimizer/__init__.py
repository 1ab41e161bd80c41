"""Which optimizer updates a parameter, with which constants, and what steers it from outside.

A rule is found by trying the update and believed only when it reproduces it. In order, as ``recogniser`` asks them:

- ``gradient_path`` goes from the gradient to where the rule begins;
- ``probe_harness`` runs the small values of the update, ``update_function`` one parameter's, both by ``numpy_ops``;
- ``sampler`` reads off what the states become;
- ``rules`` lists one formula a rule (``sgd_rules``, ``rms_rules``, ``adam_rules``); each yields a ``fits.Fit``;
- ``fit_rule`` makes hyper-parameters of what all trials agree on, with ``evidence``; ``step_count_rules`` has the rules
  that follow the count of steps.

``predicates``, ``clips`` and ``controls`` find the rest: schedule, clip, finite check, loss scale, accumulation.
"""
