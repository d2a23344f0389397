"""The TensorBoard backend of the Memory tab. Runs on hosts without torch."""
