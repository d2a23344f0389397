"""What fails in a recording does not reach the training."""
