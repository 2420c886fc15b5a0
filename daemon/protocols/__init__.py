"""Pure readers of the model server's protocols: recorded bytes in, canonical dialogue out."""
