"""A step from file to folder: ``source`` loads a step, ``sharded`` or ``split`` derives and writes folders."""
