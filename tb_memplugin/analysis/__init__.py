"""Pure functions from a trace to a frozen result. Imports numpy and nothing bigger."""
