"""Random forward models of many operators, their gradients by central differences, and their updates by NumPy."""
