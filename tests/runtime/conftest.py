"""Pytest puts the folder of a conftest on the path: the subfolders here find the helpers beside this file."""
