"""Which optimizer updates a parameter, with which constants, and what steers it from outside.

A rule is found by trying the update and believed only when it reproduces it: ``trial`` runs pieces of the update
(by ``arithmetic``), ``probe`` reads off what its states become, ``rules`` holds one formula a rule, ``settle`` makes
hyper-parameters of what all trials agree on. ``recogniser`` asks in that order; ``gates`` and ``controls`` tell the
rest: schedule, clip, finite check, loss scale, accumulation.
"""
