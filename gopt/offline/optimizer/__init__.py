"""Which optimizer updates a parameter, with which constants, and what steers it from outside.

A rule is found by trying the update and believed only when it reproduces it: ``path`` goes from the gradient to where
the rule begins, ``trial`` runs the small values of the update and ``cell`` one parameter's (by ``arithmetic``),
``probe`` reads off what its states become, ``rules`` lists one formula a rule (``plain``, ``rooted`` and ``moments``;
each yields a ``fits.Fit``), ``settle`` makes hyper-parameters of what all trials agree on (``evidence``; ``scheduled``
for rules that follow the count of steps). ``recogniser`` asks in that order; ``gates``, ``clips`` and ``controls`` tell
the rest: schedule, clip, finite check, loss scale, accumulation.
"""
