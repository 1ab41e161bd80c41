"""What gopt writes: beside its target, under a name that nobody can foresee, and in its place in one step.

``files`` makes new files and syncs them, ``rename`` moves them into place, ``staging_names`` names what is staged,
``lock`` tells what is being staged from what a dead process left, ``staging`` joins them, ``paths`` resolves targets,
``signals`` keeps an interrupt out of the steps that belong together.
"""
