"""Generated from proto/tb_memplugin/v1 by proto/generate.py. Do not edit."""
