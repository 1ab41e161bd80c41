"""Write the output folder: rank graphs, values once, manifest and report; whole or not at all (contract section 4)."""
