"""A step from file to folder: ``source`` loads a step, ``sharded`` or ``split`` makes a folder of it."""
