"""What makes a program run on fake tensors."""
