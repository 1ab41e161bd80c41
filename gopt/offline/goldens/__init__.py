"""Goldens: a short text of gopt's result for a model, reviewed by people and compared by CI.

``digests`` names a graph by its structure; ``golden_text`` writes the text of a case; ``golden_files`` reads and
writes the files of a folder.
"""
