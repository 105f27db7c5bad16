"""How a model is fitted."""
