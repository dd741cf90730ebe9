"""`scripts/train_draft`: an exit for a model's own first layers, distilled from what the model says."""
