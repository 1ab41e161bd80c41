"""How gopt writes: to a draft beside the target, under a random name, which takes the target's place in one step.

``files`` makes new files and syncs them, ``rename`` moves them into place, ``staging_names`` names what is staged,
``lock`` tells what is being staged from what a dead process left, ``staging`` joins them, ``paths`` resolves targets,
``signals`` keeps an interrupt out of the steps that belong together.
"""
