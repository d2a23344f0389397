"""The TensorBoard backend of the Memory tab. It runs on hosts without torch."""
