"""The operating system: files that appear whole or not at all, signals, child processes, memory.

An atomic write is a draft with a random name beside the target, then a replacement of the target in one step.

``files`` creates and syncs new files, ``rename`` moves them into place, ``staging_names`` names staged files, ``lock``
distinguishes live staged files from a dead process's files, ``staging`` combines these, ``paths`` resolves targets,
``signals`` defers interrupts during steps that belong together."""
