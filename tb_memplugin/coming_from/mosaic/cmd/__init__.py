"""The functions behind Mosaic's commands."""
