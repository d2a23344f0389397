"""The analysis part of Mosaic's interface."""
