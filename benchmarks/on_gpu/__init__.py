"""What only a GPU can tell, as tables for docs/gpu.md; `--device cpu` tries the same without one, small."""
