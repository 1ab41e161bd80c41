"""Steps of token streams with a truth of their own, and ranks of every kind of mesh held against it."""
