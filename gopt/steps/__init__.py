"""A step from file to folder: ``source`` is loaded, ``sharded`` or ``split`` is what is made of it and written."""
