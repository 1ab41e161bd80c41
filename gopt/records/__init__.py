"""Records that all packages know: meshes, placements, boxes, roles, tables."""
