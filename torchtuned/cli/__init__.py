"""The torchtuned command: one module a family of verbs, and what they print with."""
