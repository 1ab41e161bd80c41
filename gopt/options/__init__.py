"""Options and keywords: their types, their bounds, and the messages about wrong ones."""
