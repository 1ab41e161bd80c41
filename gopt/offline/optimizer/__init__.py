"""Identifies the optimizer of a parameter, the constants, and the controls around the rule.

A formula is found by running the update on numbers, and believed only if it reproduces them. In the order in which
``recogniser`` uses them:

- ``probe`` runs the small values of the update, and one parameter's, by the operators' kernels;
- ``gradient_path`` follows the gradient to the input of the rule;
- ``formulas`` measures the states, the signature that chooses the formulas to try; each yields a ``Fit``;
- ``evidence`` takes numbers that are equal in all trials as hyper-parameters, and finds what follows the step count.

``controls`` finds the rest: schedule, clip (``clips``), finite check, loss scale, accumulation.
"""
