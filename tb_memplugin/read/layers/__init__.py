"""Find the modules of a model from call stacks alone: docs/design/layers_from_stacks.md."""
