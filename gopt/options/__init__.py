"""Options and keywords: types, bounds, and messages about wrong values."""
