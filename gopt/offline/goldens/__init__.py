"""Goldens: what gopt makes of a model, in a short text that people review and CI compares.

``digests`` names a graph by its structure; ``golden_text`` writes the text of a case; ``golden_files`` reads and
writes the files of a folder.
"""
