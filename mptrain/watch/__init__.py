"""What happens inside the tensors."""
