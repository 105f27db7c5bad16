"""Pure mathematics on tensors."""
