"""Records known to all packages: meshes, placements, boxes, roles, tables."""
