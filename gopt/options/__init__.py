"""What options and keywords may be: their types, their bounds, and what is said of a wrong one."""
