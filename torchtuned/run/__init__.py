"""torchtuned-run: from the command's words to its place, its environment, and exec."""
