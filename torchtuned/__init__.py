"""torchtuned makes a Linux host good at PyTorch training, and keeps it so."""

__version__ = "0.1.0"
