"""What gopt writes: beside its target, under a name that nobody can foresee, and in its place in one step.

``files`` makes new files and syncs them, ``rename`` moves them into place, ``names`` are those of drafts, ``lock``
tells a draft in work from one that was left, ``draft`` joins them, ``signals`` keeps an interrupt out of the steps
that belong together.
"""
