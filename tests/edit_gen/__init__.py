"""Folders of drawn steps whose files are edited at random: what is said of them, beside the numbers of their ranks."""
